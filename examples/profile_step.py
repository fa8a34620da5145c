"""Where does the time of a training step go? Its kernels by time, and a trace to look at.

    python examples/profile_step.py

Open build/step-trace.json at https://ui.perfetto.dev or chrome://tracing.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from a2lib.model import TransformerLM
from a2lib.shapes import Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = Shape(d_model=256, d_ff=1024, num_layers=4, num_heads=4, vocab_size=4096)
BATCH, CONTEXT = 4, 256
TRACE = Path("build/step-trace.json")

attention = "flash" if DEVICE == "cuda" else "eager"
model = TransformerLM.from_size(SHAPE, CONTEXT, attention=attention, device=DEVICE, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.randint(SHAPE.vocab_size, (BATCH, CONTEXT + 1), device=DEVICE)


def step():
    """Run one step, each of its phases in a range with its name."""
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=DEVICE == "cuda")
    with record_function("forward"), autocast:
        loss = model(tokens[:, :-1], tokens[:, 1:])
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


for _ in range(3):  # the first steps compile kernels and fill caches
    step()
activities = [ProfilerActivity.CPU]
if DEVICE == "cuda":
    activities.append(ProfilerActivity.CUDA)
with profile(activities=activities) as profiler:
    step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()

averages = {event.key: event for event in profiler.key_averages()}
for phase in ("forward", "backward", "optimizer"):
    print(f"{phase:10} {averages[phase].cpu_time_total / 1e3:8.2f} ms of the CPU's time")
print(profiler.key_averages().table(sort_by=f"self_{DEVICE}_time_total", row_limit=15))
TRACE.parent.mkdir(exist_ok=True)
profiler.export_chrome_trace(str(TRACE))
print(f"The trace is in {TRACE}")

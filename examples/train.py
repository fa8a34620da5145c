"""Train a small language model on English text, byte by byte, in one process or in several.

    python examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py --wrapper fsdp
    python examples/train.py --steps 400 --resume     # go on where the last run ended

The text is Python's own documentation. Losses, weights and moments go to the folder."""

import argparse
import os
import pydoc_data.topics
import time
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist

from a2lib.model import TransformerLM
from a2lib.parallel import DDP, FSDP, load_sharded, save_sharded
from a2lib.shapes import Shape
from a2lib.theory.transformer import step_flops

SHAPE = Shape(d_model=128, d_ff=512, num_layers=4, num_heads=2, vocab_size=256)
BATCH, CONTEXT = 8, 128  # sequences of a process, and bytes of a sequence
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}  # bf16, by the data sheets
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TEXT = "\n".join(pydoc_data.topics.topics.values()).encode()
WRAPPERS = {"none": lambda module: module, "ddp": DDP, "fsdp": FSDP}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--wrapper", choices=WRAPPERS, default="none")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", type=Path, default=Path("build/train"))
parser.add_argument("--resume", action="store_true", help="go on where the last run ended")
options = parser.parse_args()
if (WORLD > 1) != (options.wrapper != "none"):
    parser.error(f"--wrapper {options.wrapper} with {WORLD} process(es): torchrun with ddp or fsdp")
losses = options.folder / "losses.csv"
if options.resume != losses.exists():
    state = "has a run: --resume, or another --folder" if losses.exists() else "has no run"
    parser.error(f"{options.folder} {state}")
lines = pd.read_csv(losses).to_dict("records") if options.resume else []
if options.steps <= len(lines):
    parser.error(f"--steps {options.steps}: the run has {len(lines)} steps already")
if DEVICE == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
if WORLD > 1:
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")

attention = "flash" if DEVICE == "cuda" else "eager"
plain = TransformerLM.from_size(SHAPE, CONTEXT, attention=attention, device=DEVICE, seed=0)
model = WRAPPERS[options.wrapper](plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if lines:
    folder = options.folder / f"step-{len(lines)}"
    if options.wrapper == "fsdp":
        load_sharded(folder, model, optimizer)
    else:
        weights, moments = torch.load(folder / "state.pt", map_location=DEVICE)
        plain.load_state_dict(weights)
        optimizer.load_state_dict(moments)

for step in range(len(lines) + 1, options.steps + 1):
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(step * WORLD + RANK)  # each rank has its own batch
    starts = torch.randint(len(TEXT) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
    tokens = torch.tensor([list(TEXT[i : i + CONTEXT + 1]) for i in starts], device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16, enabled=DEVICE == "cuda"):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    if WORLD > 1:
        model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()
    line = {"step": step, "loss": loss.item()}  # of this rank; .item() waits for the GPU
    seconds = time.perf_counter() - began
    line["tokens/s"] = WORLD * BATCH * CONTEXT / seconds
    if DEVICE == "cuda" and torch.cuda.get_device_name() in PEAK_FLOPS:
        flops = step_flops(SHAPE, BATCH, CONTEXT, causal=True)
        line["MFU"] = flops / seconds / PEAK_FLOPS[torch.cuda.get_device_name()]
    lines.append(line)
    if RANK == 0 and (step % 10 == 0 or step == options.steps):
        print(", ".join(f"{name} {value:,.4g}" for name, value in line.items()), flush=True)

options.folder.mkdir(parents=True, exist_ok=True)
folder = options.folder / f"step-{options.steps}"
if options.wrapper == "fsdp":
    save_sharded(folder, model, optimizer)
elif RANK == 0:
    folder.mkdir(exist_ok=True)
    torch.save([plain.state_dict(), optimizer.state_dict()], folder / "state.pt")
if RANK == 0:
    table = pd.DataFrame(lines)
    table.to_csv(losses, index=False)
    table.plot(x="step", y="loss").figure.savefig(options.folder / "losses.png")
if WORLD > 1:
    dist.destroy_process_group()

"""Train a small language model on English text, byte by byte, in one process or in several.

    python examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py --wrapper fsdp
    python examples/train.py --steps 400 --resume     # go on where the first of them ended

The text is Python's own documentation. Ctrl-C ends the run behind its step, and saves it."""

import argparse
import os
import pydoc_data.topics
import signal
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
DEVICE, ATTENTION = ("cuda", "flash") if torch.cuda.is_available() else ("cpu", "eager")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TEXT = "\n".join(pydoc_data.topics.topics.values()).encode()
WRAPPERS = {"none": lambda module: module, "ddp": DDP, "fsdp": FSDP}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--wrapper", choices=WRAPPERS, default="none", help="ddp, fsdp: in torchrun")
parser.add_argument("--steps", type=int, default=100, help="in all, resumed ones included (100)")
parser.add_argument("--folder", type=Path, help="of losses and weights (build/train-WRAPPER)")
parser.add_argument("--resume", action="store_true", help="go on where the folder's run ended")
options = parser.parse_args()
if (WORLD > 1) != (options.wrapper != "none"):
    parser.error(f"--wrapper {options.wrapper} with {WORLD} process(es): torchrun with ddp or fsdp")
folder = options.folder or Path(f"build/train-{options.wrapper}")
losses = folder / "losses.csv"
if options.resume != losses.exists():
    parser.error(f"{folder} has {'no run' if options.resume else 'a run: --resume, or --folder'}")
lines = pd.read_csv(losses).to_dict("records") if options.resume else []
if options.steps <= len(lines):
    parser.error(f"--steps {options.steps}: the run has {len(lines)} steps already")
folder.mkdir(parents=True, exist_ok=True)  # what cannot be written fails before the training
if DEVICE == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # more would gain little here
if WORLD > 1:
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")

plain = TransformerLM.from_size(SHAPE, CONTEXT, attention=ATTENTION, device=DEVICE, seed=0)
model = WRAPPERS[options.wrapper](plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if lines and options.wrapper == "fsdp":
    load_sharded(folder / f"step-{len(lines)}", model, optimizer)
elif lines:
    weights, moments = torch.load(folder / f"step-{len(lines)}", map_location=DEVICE)
    plain.load_state_dict(weights)
    optimizer.load_state_dict(moments)
signals = []
signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
for step in range(len(lines) + 1, options.steps + 1):
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(step * WORLD + RANK)  # each rank has its own batch
    starts = torch.randint(len(TEXT) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
    tokens = torch.tensor([list(TEXT[i : i + CONTEXT + 1]) for i in starts], device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16, enabled=DEVICE == "cuda"):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    stop = torch.tensor(len(signals), device=DEVICE)
    if WORLD > 1:
        model.finish_gradient_synchronization()
        dist.all_reduce(stop)  # all ranks end at one step
    optimizer.step()
    optimizer.zero_grad()
    lines.append({"step": step, "loss": loss.item()})  # of this rank; .item() waits for the GPU
    seconds, flops = time.perf_counter() - began, step_flops(SHAPE, BATCH, CONTEXT, causal=True)
    lines[-1]["tokens/s"] = WORLD * BATCH * CONTEXT / seconds
    lines[-1]["MFU of an H100"] = flops / seconds / 989e12  # bf16, by the data sheet; an H200's too
    if RANK == 0 and (step % 10 == 0 or step == options.steps):
        print(", ".join(f"{name} {x:,.4g}" for name, x in lines[-1].items()), flush=True)
    if stop:
        break

checkpoint = folder / f"step-{step}"
if options.wrapper == "fsdp":
    save_sharded(checkpoint, model, optimizer)
elif RANK == 0:
    torch.save([plain.state_dict(), optimizer.state_dict()], checkpoint)
if RANK == 0:
    pd.DataFrame(lines).to_csv(losses, index=False)
    pd.DataFrame(lines).plot("step", "loss", ylabel="loss").figure.savefig(folder / "losses.png")
    print(f"the losses are in {losses} and losses.png, weights and moments in {checkpoint}")
    print(f"stopped at step {step}; --resume goes on (from the last one with more --steps)")
if WORLD > 1:
    dist.destroy_process_group()

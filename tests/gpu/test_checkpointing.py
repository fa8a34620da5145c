"""Peaks of a step under each strategy on the GPU, against what is counted of its tensors."""

import pytest
import torch

from a2lib.experiments.checkpointing import handlers
from a2lib.experiments.workload import Config
from a2lib.experiments.workload.run import float32_products
from a2lib.experiments.workload.workload import Workload
from a2lib.lab.memory import take_workspaces
from a2lib.theory.memory.checkpointing import strategy_peak
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.transformer import Shape, state_bytes

pytestmark = pytest.mark.gpu

# Whole MiB of every large tensor, so that the allocator rounds little.
SHAPE, BATCH, CONTEXT = Shape(512, 2048, 8, 8, vocab_size=1024), 4, 1024
STRATEGIES = ["none", "block", "half", "segments:2", "nested:4", "recursive", "chain"]
STRATEGIES += ["selective:linear", "selective:attention"]


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
@pytest.mark.parametrize(
    ("precision", "attention"),
    [("fp32", "eager"), ("tf32", "eager"), ("bf16", "eager"), ("bf16", "flash")],
)
def test_the_peak_is_what_is_counted(no_garbage, precision, attention, fresh):
    take_workspaces("cuda")
    empty = torch.cuda.memory_allocated()
    sizes = {"d_model": 512, "d_ff": 2048, "num_layers": 8, "num_heads": 8, "vocab_size": 1024}
    sizes |= {"context": CONTEXT, "batch": BATCH, "device": "cuda"}
    how = {"precision": precision, "attention": attention, "keep_gradients": not fresh}
    config = Config(**sizes, **how, autocast_cache=False)
    narrow = "bf16" if precision == "bf16" else "fp32"
    step = StepMemory(SHAPE, BATCH, CONTEXT, precision=narrow, attention=attention, fresh=fresh)
    state, off = state_bytes(SHAPE), {}
    with float32_products(precision):
        workload = Workload(config, "cuda")
        for name in STRATEGIES:
            workload.model.use_checkpointing(name)
            row = handlers._measured(workload, "cuda", 2, empty)
            off[name] = row["peak_bytes"] / strategy_peak(step, name) - 1
            held = state.total - (state.gradients if fresh else 0)
            # A block is up to 1 MiB larger than its tensor.
            assert held <= row["held_bytes"] < 1.1 * held + 2**27
            assert "note" not in row, row["note"]
    assert all(abs(peak) < 0.04 for peak in off.values()), off

"""Peaks of a step under each strategy on the GPU, against what is counted of its tensors."""

import pytest
from notebook_cells import load_cells

from a2lib.shapes import Shape
from a2lib.theory.memory.checkpointing import strategy_peak
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.transformer import parameter_count

pytestmark = pytest.mark.gpu

# Whole MiB of every large tensor, so that the allocator rounds little.
SHAPE = Shape(512, 2048, 8, 8, vocab_size=1024)
STRATEGIES = "none,block,half,segments:2,nested:4,recursive,chain,selective:linear"


@pytest.mark.parametrize("gradients", ["kept", "fresh"])
@pytest.mark.parametrize(
    ("precision", "attention"),
    [("fp32", "eager"), ("tf32", "eager"), ("bf16", "eager"), ("bf16", "flash")],
)
def test_the_peak_is_what_is_counted(no_garbage, precision, attention, gradients):
    cells = load_cells(
        "checkpointing",
        model="tiny",
        layers=8,
        context=1024,
        precision=precision,
        attention=attention,
        gradients=gradients,
        strategies=f"{STRATEGIES},selective:attention",
        steps=2,
    )
    cells.sizes["tiny"] = SHAPE
    held = (12 if gradients == "fresh" else 16) * parameter_count(SHAPE)
    for row in cells.measure(cells.tasks[0]):
        assert "status" not in row and "note" not in row, row
        assert row["peak_bytes"] == pytest.approx(counted(row), rel=0.04), row["strategy"]
        # A block is up to 1 MiB larger than its tensor.
        assert held <= row["held_bytes"] < 1.1 * held + 2**27


def counted(row):
    step = StepMemory(
        SHAPE,
        row["batch"],
        row["context"],
        precision="bf16" if row["precision"] == "bf16" else "fp32",
        attention=row["attention"],
        fresh=row["gradients"] == "fresh",
    )
    return strategy_peak(step, row["strategy"])

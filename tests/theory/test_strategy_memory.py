"""The peak of a step under a strategy against every tensor of the whole step."""

import pytest
from refusals import refused

from a2lib.theory.memory.step import StepMemory, peak
from a2lib.theory.memory.strategies import strategy_memory
from a2lib.theory.transformer import SIZES, Shape

# The highest is of the blocks, or of the last two the embedding's gradient, and the product of the
# head's weight.
WHOLE = [
    (SIZES["small"], 4, 256), (SIZES["2.7B"], 4, 512), (SIZES["2.7B"], 4, 2048),
    (Shape(24, 40, 2, 2, 56), 2, 16),
    (Shape(32, 96, 3, 2, 100), 2, 8), (Shape(16, 160, 2, 2, 8), 4, 16),
    (SIZES["large"], 4, 128), (SIZES["2.7B"], 1, 128),
]  # fmt: skip


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_strategy_it_is_the_step_to_the_byte(precision, attention, fresh):
    """One block's moments stand for all: against every tensor of all blocks."""
    for shape, batch, context in WHOLE:
        how = {"precision": precision, "attention": attention, "fresh": fresh}
        step = StepMemory(shape, batch, context, "forward-backward", **how)
        kept, most = strategy_memory(step, "none")
        assert most == peak(step).total - sum(step.standing().values()), (shape, context)
        before = [event for event in step.events() if event.phase in ("forward", "loss")]
        assert kept == sum(event.bytes if event.made else -event.bytes for event in before)


def test_what_is_no_strategy_is_one_line():
    step = StepMemory(WHOLE[3][0], 1, 8)
    refused("allowed are none", strategy_memory, step, "all")
    refused("as ops are linear", strategy_memory, step, "selective:all")

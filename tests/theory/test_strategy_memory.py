"""The peak of a step under a strategy: by hand, and against every tensor of the whole step."""

from dataclasses import replace

import pytest
from refusals import refused

from a2lib.theory.memory.checkpointing import ATTENTION, FFN
from a2lib.theory.memory.step import StepMemory, peak
from a2lib.theory.memory.strategies import StrategyMemory, block_bytes, strategy_memory
from a2lib.theory.transformer import SIZES, Shape, block_parameter_count

SCALARS = 8  # the loss of the measurement and its gradient


def test_the_softmax_by_hand():
    """A block of long sequences: weights, dp, its product and ds; seven tensors of its input's
    size, the roots and the mask."""
    shape, batch, context = Shape(16, 24, 1, 4), 2, 64
    step = StepMemory(shape, batch, context)
    u, s = 4 * batch * context * 16, 4 * batch * 4 * context**2
    block, halves = block_bytes(replace(step, fresh=False))
    assert block.peak == halves[ATTENTION].peak == 4 * s + 7 * u + 4 * batch * context + context**2
    fresh, halves = block_bytes(step)
    of_output = 4 * 16 * 16
    assert fresh.peak - block.peak == of_output + halves[FFN].gradients
    assert sum(half.gradients for half in halves.values()) == 4 * block_parameter_count(shape)
    assert fresh.saved == sum(half.saved for half in halves.values())


def test_a_step_of_two_blocks_by_hand():
    step = StepMemory(Shape(16, 24, 2, 4, vocab_size=8), 2, 64)
    block, _ = block_bytes(step)
    rows = 2 * 64
    # Input, normalised, scaled, root, log-softmax; then gradients of head and gain; two numbers.
    head, left = 4 * (3 * 16 + 1 + 8) * rows + SCALARS, 4 * 9 * 16 + SCALARS
    assert strategy_memory(step) == StrategyMemory(
        2 * block.saved + head, block.saved + block.peak + left, "blocks"
    )
    every = strategy_memory(step, "block")
    later = max(block.gradients, block.input)
    assert every.kept == 2 * block.input + head
    assert every.peak == later + block.peak + left
    step = replace(step, fresh=False)
    kept, (block, _) = strategy_memory(step, "block"), block_bytes(step)
    assert kept.peak == block.input + block.peak + SCALARS


# Of the last two the highest is the embedding's gradient, and the product of the head's weight.
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
    where = set()
    for shape, batch, context in WHOLE:
        how = {"precision": precision, "attention": attention, "fresh": fresh}
        step = StepMemory(shape, batch, context, "forward-backward", **how)
        found = strategy_memory(step)
        beyond = -sum(step.standing().values())
        assert found.peak == peak(step).total + beyond, (shape, context)
        live = sum((e.bytes if e.made else -e.bytes) * (e.phase in ("forward", "loss"))
                   for e in step.events())  # fmt: skip
        assert found.kept == live
        where.add(found.where)
    assert where == ({"blocks", "head", "embedding"} if fresh else {"blocks", "head"})


def test_what_is_no_strategy_is_one_line():
    step = StepMemory(WHOLE[3][0], 1, 8)
    refused("allowed are none", strategy_memory, step, "all")
    refused("as ops are linear", strategy_memory, step, "selective:all")

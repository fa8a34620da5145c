"""A divided optimizer's memory, against sums a person can make."""

import pytest

from a2lib.shapes import Shape
from a2lib.theory.memory.step import OPTIMIZER, WORKSPACE, StepMemory
from a2lib.theory.sharding import MOMENTS, UPDATE_BYTES, Held
from a2lib.theory.transformer import parameter_count

SHAPE = Shape(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=128)
P = parameter_count(SHAPE)
# Nine tensors a block, embedding, head and a norm; batch 2 of 8 tokens and their targets, RoPE.
TENSORS, INPUTS, TABLES = 21, 2 * 2 * 8 * 8, 4 * 8 * 16


def held(sharded, ranks=2):
    return Held(StepMemory(SHAPE, 2, 8), ranks, sharded)


def test_three_moments_without_sharding_are_4_8_and_16_bytes_a_parameter():
    levels = [sum(held(False).at(moment).values()) for moment in MOMENTS]
    rest = INPUTS + TABLES
    later = rest + 2 * WORKSPACE + 4
    assert levels == [4 * P + rest, 8 * P + later, 16 * P + 4 * TENSORS + later]
    # A fused update reads weight, gradient and two moments, and writes all but the gradient.
    assert UPDATE_BYTES == 4 * (4 + 3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_sharding_divides_the_state_alone(ranks):
    whole, part = held(False, ranks), held(True, ranks)
    assert sum(part.state()) == whole.state()[0] and len(part.state()) == ranks
    largest = 2 * 4 * 32 * 128 + 4
    assert max(part.state()) <= whole.state()[0] / ranks + largest
    for moment in MOMENTS:
        mine, theirs = part.at(moment), whole.at(moment)
        assert (mine[OPTIMIZER] > 0) == (moment == "after")
        assert {**mine, OPTIMIZER: theirs[OPTIMIZER]} == theirs

"""A divided optimizer's memory, against sums a person can make."""

import pytest

from a2lib.shapes import Shape
from a2lib.theory.memory.step import WORKSPACE, StepMemory, optimizer_bytes
from a2lib.theory.sharding import MOMENTS, UPDATE_BYTES, held_bytes, largest_state
from a2lib.theory.transformer import parameter_count

SHAPE = Shape(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=128)
STEP, P = StepMemory(SHAPE, 2, 8), parameter_count(SHAPE)
# Nine tensors a block, embedding, head and a norm; batch 2 of 8 tokens and their targets, RoPE.
TENSORS, INPUTS, TABLES = 21, 2 * 2 * 8 * 8, 4 * 8 * 16


def test_three_moments_without_sharding_are_4_8_and_16_bytes_a_parameter():
    levels = [held_bytes(STEP, 2, False, moment) for moment in MOMENTS]
    rest = INPUTS + TABLES
    later = rest + 2 * WORKSPACE + 4
    assert levels == [4 * P + rest, 8 * P + later, 16 * P + 4 * TENSORS + later]
    # A fused update reads weight, gradient and two moments, and writes all but the gradient.
    assert UPDATE_BYTES == 4 * (4 + 3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_sharding_divides_the_state_alone(ranks):
    whole, largest_tensor = optimizer_bytes(STEP), 2 * 4 * 32 * 128 + 4
    assert whole / ranks <= largest_state(STEP, ranks) <= whole / ranks + largest_tensor
    spared = [held_bytes(STEP, ranks, False, m) - held_bytes(STEP, ranks, True, m) for m in MOMENTS]
    assert spared == [0, 0, whole - largest_state(STEP, ranks)]

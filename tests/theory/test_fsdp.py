"""Memory of fully sharded data parallel, by hand."""

import pytest

from a2lib.shapes import SIZES, Shape
from a2lib.theory import fsdp
from a2lib.theory.transformer import parameter_count

# Embedding and head of 10, three blocks of 100 with vectors of 4, and a vector of 2.
SMALL = Shape(d_model=2, d_ff=14, num_layers=3, num_heads=1, vocab_size=5)
OWN = 4 * (320 / 2 + 14)  # of two ranks


def test_what_is_sharded_are_the_models_matrices():
    # xl of 2025: two tables; of 48 blocks four of 1600 by 1600 and three of 1600 by 6400.
    assert fsdp.matrices(SIZES["xl25"]) == 32_000_000 + 48 * 40_960_000
    assert fsdp.matrices(SIZES["xl25"]) == parameter_count(SIZES["xl25"]) - 155_200


def test_between_steps_a_rank_has_its_share():
    init, before, after = fsdp.between(SMALL, 2)
    assert [init.total, before.total, after.total] == [OWN, 2 * OWN, 4 * OWN]
    assert after.parts["optimizer"] == 2 * OWN and after.parts["gathered"] == 0
    # Of one rank it is the 16 bytes of everybody.
    assert fsdp.between(SMALL, 1)[-1].total == 16 * parameter_count(SMALL)
    xl = fsdp.between(SIZES["xl25"], 2)[-1].total
    assert xl == pytest.approx(16 * parameter_count(SIZES["xl25"]) / 2, rel=1e-4)


# By hand. The root's weights are 40 bytes, a block's 200, its cast 400; the head's gradient is 20,
# a block's share of the gradients 216, the last norm's 8.
MOMENTS = [
    # moment, gathered, travelling, gradients, activations
    ("forward root", 40 + 200, 0, 0, 0),
    ("forward 0", 40 + 2 * 200, 0, 0, 0),
    ("forward 1", 40 + 2 * 200, 0, 0, 100),
    ("forward 2", 40 + 200, 0, 0, 200),
    ("backward root", 40 + 200, 0, 0, 300),
    ("backward 2", 40 + 2 * 200, 20, 8, 300),
    ("made 2", 40 + 2 * 200, 20 + 200, 8, 200),
    # a gradient beside its cast, and the block's weights are gone
    ("sent 2", 40 + 200, 20 + 600, 8 + 216, 200),
    ("backward 1", 40 + 2 * 200, 20 + 400, 8 + 216, 200),
    ("made 1", 40 + 2 * 200, 20 + 600, 8 + 216, 100),
    ("sent 1", 40 + 200, 20 + 600, 8 + 432, 100),
    ("backward 0", 40 + 200, 20 + 400, 8 + 432, 100),
    ("made 0", 40 + 200, 20 + 600, 8 + 432, 0),
    # the root's two gradients, cast, beside block 0's; then block 0's and its cast
    ("sent root", 200, 40 + 80 + 200, 8 + 432 + 40, 0),
    ("sent 0", 0, 200 + 400, OWN, 0),
]


def test_two_blocks_are_whole_at_once_and_one_cast_travels():
    found = list(fsdp.step(SMALL, 2, activations=300))
    for held, expected in zip(found, MOMENTS, strict=True):
        sizes = held.gathered, held.travelling, held.gradients, held.activations
        assert (held.moment, *sizes) == expected
        assert (held.parameters, held.optimizer) == (OWN, 2 * OWN)


def test_the_peak_is_where_activations_make_it():
    # Few: near the end, when most gradients are there. Many: at the begin of backward.
    assert fsdp.peak(SMALL, 2, 0).moment == "sent 1"
    assert fsdp.peak(SMALL, 2, 10**6).moment == "backward 2"
    # Of the largest vocabulary, at the root's gradients.
    wide = Shape(d_model=2, d_ff=1, num_layers=3, num_heads=1, vocab_size=500)
    assert fsdp.peak(wide, 2, 0).moment == "sent root"

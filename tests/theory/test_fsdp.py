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


def test_two_blocks_are_whole_at_once_and_one_cast_travels():
    found = {held.moment: held for held in fsdp.step(SMALL, 2, activations=300)}
    root, block = 2 * 20, 2 * 100
    gathered = {moment: held.gathered - root for moment, held in found.items()}
    assert [gathered[f"forward {i}"] for i in ("root", 0, 1, 2)] == [block, *[2 * block] * 2, block]
    backward = [gathered[f"backward {i}"] for i in ("root", 2, 1, 0)]
    assert backward == [block, 2 * block, 2 * block, block]
    # The head's gradient, then a cast of 400 bytes from the second block on.
    assert [found[f"backward {i}"].travelling - 20 for i in (2, 1, 0)] == [0, 400, 400]
    # The block's own beside it.
    assert [found[f"made {i}"].travelling - 20 for i in (2, 1, 0)] == [200, 600, 600]
    assert [gathered[f"made {i}"] for i in (2, 1, 0)] == [2 * block, 2 * block, block]
    # Beside its cast, and the block's weights are gone.
    assert [found[f"sent {i}"].travelling - 20 for i in (2, 1)] == [600, 600]
    assert [gathered[f"sent {i}"] for i in (2, 1)] == [block, block]
    assert [found[f"sent {i}"].gradients for i in (2, 1)] == [8 + 216, 8 + 432]
    # At the end the root's two gradients, cast, beside block 0's; then block 0's and its cast.
    assert found["sent root"].travelling == 40 + 80 + 200
    assert found["sent root"].gathered == block
    assert found["sent 0"].travelling == 200 + 400 and found["sent 0"].gathered == 0
    assert found["sent 0"].gradients == OWN
    assert [found[f"backward {i}"].activations for i in (2, 1, 0)] == [300, 200, 100]
    assert [found[f"made {i}"].activations for i in (2, 1, 0)] == [200, 100, 0]
    assert all(held.parameters == OWN and held.optimizer == 2 * OWN for held in found.values())


def test_the_peak_is_where_activations_make_it():
    # Few: near the end, when most gradients are there. Many: at the begin of backward.
    assert fsdp.peak(SMALL, 2, 0).moment == "sent 1"
    assert fsdp.peak(SMALL, 2, 10**6).moment == "backward 2"
    # Of the largest vocabulary, at the root's gradients.
    wide = Shape(d_model=2, d_ff=1, num_layers=3, num_heads=1, vocab_size=500)
    assert fsdp.peak(wide, 2, 0).moment == "sent root"

"""What the page on eager attention draws and calculates, beside theory."""

import pytest

from a2lib.report.pages import attention, attention_tables
from a2lib.theory.eager import Eager


@pytest.mark.parametrize("pass_", attention.PASSES)
def test_the_most_matrices_drawn_are_those_that_theory_counts(pass_):
    eager = Eager(8, 16384, 64, causal=True)
    drawn = attention.matrices(pass_)
    assert drawn.sum(axis=1).max() == eager.total(pass_) // eager.matrix
    assert drawn[attention.SAVED].iloc[-1] == 1 and drawn[attention.SAVED].max() == 1


def test_seven_matmuls_in_round_numbers():
    # 7 x 2 x 8 x 16384^2 x 64 operations at 1 TFLOP/s; half of them under a mask.
    whole = attention_tables.matmul_ms(1.0, masked_half=True)
    assert whole == pytest.approx(7 * 2 * 8 * 16384**2 * 64 / 1e9)
    assert attention_tables.matmul_ms(1.0, masked_half=False) == pytest.approx(whole / 2)

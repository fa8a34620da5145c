"""What the page on eager attention draws and calculates, beside theory."""

import pytest

from a2lib.report.pages import attention
from a2lib.theory.eager import Eager


@pytest.mark.parametrize("pass_", attention.PASSES)
def test_the_most_matrices_drawn_are_those_that_theory_counts(pass_):
    eager = Eager(8, 16384, 64, causal=True)
    drawn = attention.matrices(pass_)
    assert drawn.sum(axis=1).max() == eager.total(pass_) // eager.matrix
    assert drawn[attention.SAVED].iloc[-1] == 1 and drawn[attention.SAVED].max() == 1

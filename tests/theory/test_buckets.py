"""Buckets: the handout's formula by hand, and what they hold."""

import pytest
import torch

from a2lib.model import TransformerLM
from a2lib.shapes import SIZES, Shape
from a2lib.theory.buckets import best_size, count_buckets, overhead_s
from a2lib.theory.latency import Line
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.transformer import parameter_count

LINE = Line(2e-5, 3e11)


def test_the_formula_by_hand():
    """Four buckets of two bytes, a byte a second, half a second for each collective: the first is
    there at 2, the last gradient at 8, and the link is busy from 2 to 12."""
    assert overhead_s(8, 4, Line(0.5, 1.0)) == 12 - 8


def test_the_best_number_is_a_minimum():
    total = 8e9
    best = total / best_size(total, LINE)
    least = overhead_s(total, best, LINE)
    assert least == pytest.approx(2 * (total * LINE.overhead_s / LINE.bandwidth) ** 0.5)
    for factor in (0.5, 0.99, 1.01, 2):
        assert overhead_s(total, best * factor, LINE) > least
    assert best_size(total, LINE) == pytest.approx((total * 2e-5 * 3e11) ** 0.5)


def test_a_bucket_holds_what_fits_and_a_larger_gradient_has_its_own():
    assert count_buckets([4, 1, 2, 9], 5) == 3
    assert count_buckets([4, 1, 2, 9, 1], 5) == 4 and count_buckets([], 5) == 0


def test_gradients_are_the_models_in_the_order_of_a_backward():
    shape = Shape(8, 16, 2, 2, vocab_size=11)
    model = TransformerLM.from_size(shape, 4)
    arrived = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: arrived.append(p.nbytes))
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    sizes = StepMemory(shape).parameters().values()
    assert list(reversed(sizes)) == arrived
    for name in ("small", "xl25"):
        parameters = StepMemory(SIZES[name]).parameters().values()
        assert sum(parameters) == 4 * parameter_count(SIZES[name])

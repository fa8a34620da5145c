"""Buckets: the handout's formula against a clock, and the clock by hand."""

import pytest
import torch

from a2lib.model import TransformerLM
from a2lib.shapes import SIZES, Shape
from a2lib.theory import buckets
from a2lib.theory.buckets import Gradient, best_size, curve, fill, overhead_s, simulate
from a2lib.theory.latency import Line
from a2lib.theory.transformer import parameter_count

LINE = Line(2e-5, 3e11)


@pytest.mark.parametrize("count", [1, 7, 40, 400])
def test_the_formula_is_the_clock_under_its_assumption(count):
    """Each bucket's gradients take as long as its bytes."""
    total = 8e9
    sizes = [total / count] * count
    ready = [(k + 1) * total / count / LINE.bandwidth for k in range(count)]
    assert len(list(fill(sizes, total / count))) == count
    exposed = simulate(sizes, ready, total / count, LINE.time_s)
    assert exposed == pytest.approx(overhead_s(total, count, LINE))


def test_the_best_number_is_a_minimum():
    total = 8e9
    best = total / best_size(total, LINE)
    least = overhead_s(total, best, LINE)
    assert least == pytest.approx(2 * (total * LINE.overhead_s / LINE.bandwidth) ** 0.5)
    assert all(overhead_s(total, best * f, LINE) > least for f in (0.5, 0.99, 1.01, 2))
    assert best_size(total, LINE) == pytest.approx((total * 2e-5 * 3e11) ** 0.5)


def test_the_clock_by_hand():
    # Ready at 1, 2, 10; a message takes as many seconds as it has bytes.
    ready = [1, 2, 10]
    assert simulate([4, 1, 2], ready, 0, float) == 2  # 1-5, 5-6, 10-12
    assert simulate([4, 1, 2], ready, 5, float) == 2  # 2-7, 10-12
    assert simulate([4, 1, 2], ready, 99, float) == 7  # 10-17
    assert simulate([4, 9, 2], ready, 0, float) == 6  # 1-5, 5-14, 14-16
    assert list(fill([4, 1, 2, 9], 5)) == [[0, 1], [2], [3]]


def test_gradients_are_the_models_in_the_order_of_a_backward():
    shape = Shape(8, 16, 2, 2, vocab_size=11)
    model = TransformerLM.from_size(shape, 4)
    arrived = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: arrived.append(p.numel()))
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    assert [one.elements for one in buckets.gradients(shape)] == arrived
    for name in ("small", "xl25"):
        made = buckets.gradients(SIZES[name])
        assert sum(one.elements for one in made) == parameter_count(SIZES[name])
        assert sum(one.share for one in made) == pytest.approx(1)
    assert buckets.arrivals([Gradient(1, 0.25), Gradient(1, 0.75)], 4.0) == [1.0, 4.0]


def test_the_curve_goes_through_its_points():
    cost = curve([100.0, 1.0, 10.0], [50.0, 2.0, 10.0])
    assert [cost(s) for s in (0.1, 1, 10, 100, 200)] == pytest.approx([2, 2, 10, 50, 100])
    assert cost(10**0.5) == pytest.approx((2 * 10) ** 0.5)


def test_a_compiled_block_makes_its_gradients_at_once():
    made = buckets.gradients(Shape(8, 16, 2, 2, vocab_size=11))
    each = buckets.arrivals(made, 3.0)
    found = buckets.block_by_block(each, 2)
    assert found[:2] == each[:2] and found[-1] == each[-1]
    assert set(found[2:11]) == {each[10]} and set(found[11:20]) == {each[19]} and len(found) == 21

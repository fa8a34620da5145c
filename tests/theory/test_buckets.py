"""The size of a bucket: the formula by hand, and the simulation against it."""

import math

import pytest

from a2lib.theory.buckets import (
    Gradient,
    best_bucket,
    exposed_s,
    gradients,
    overhead_s,
    simulate,
)
from a2lib.theory.latency import Line
from a2lib.theory.transformer import SIZES, parameter_count

LINE = Line(overhead_s=2.0, bandwidth=10.0)


def test_the_formula_by_hand():
    # 8 buckets of 100: 8 overheads of 2 s, and 100 bytes at 10 a second.
    assert overhead_s(800, 100, LINE) == 26
    assert best_bucket(800, LINE) == pytest.approx(math.sqrt(800 * 2 * 10))
    least = overhead_s(800, best_bucket(800, LINE), LINE)
    assert least == pytest.approx(2 * math.sqrt(800 * 2 / 10))
    assert all(overhead_s(800, b, LINE) > least for b in (100, 120, 135, 200))
    with pytest.raises(ValueError, match="bucket is 0; allowed are numbers above 0"):
        overhead_s(800, 0, LINE)


@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_the_simulation_is_the_formula_where_computing_takes_as_long_as_sending(n):
    """20 gradients of 40 bytes, each computed in the 4 s that its bytes take."""
    made = [Gradient(40, 4.0 * (k + 1)) for k in range(20)]
    found = exposed_s(simulate(made, 800 / n, LINE), 80)
    assert found == pytest.approx(overhead_s(800, 800 / n, LINE))


def test_messages_wait_for_their_gradients_and_for_each_other():
    made = [Gradient(40, 1), Gradient(30, 2), Gradient(90, 3), Gradient(10, 30)]
    first, second, third = simulate(made, 75, LINE)
    assert (first.size, first.ready_s, first.start_s, first.end_s) == (70, 2, 2, 11)
    # Larger than a bucket, and held up by the first.
    assert (second.size, second.ready_s, second.start_s, second.end_s) == (90, 3, 11, 22)
    assert (third.start_s, third.end_s) == (30, 33)
    assert exposed_s([first, second, third], 30) == 3 and exposed_s([first], 12) == 0
    assert len(simulate(made, 0, LINE)) == 4
    with pytest.raises(ValueError, match="in the order in which they become ready"):
        simulate(made[::-1], 75, LINE)


@pytest.mark.parametrize("name", ["xl25", "2.7B"])
def test_the_gradients_are_those_of_the_model(name):
    shape = SIZES[name]
    each, blocks = (gradients(shape, 0.06, blocks=b) for b in (False, True))
    assert sum(g.size for g in each) == 4 * parameter_count(shape)
    assert [g.size for g in each] == [g.size for g in blocks]
    table = 4 * shape.vocab_size * shape.d_model
    assert each[0].size == each[-1].size == table
    assert each[-1].ready_s == each[-2].ready_s == pytest.approx(0.06)
    assert all(a.ready_s <= b.ready_s for a, b in zip(each, blocks, strict=True))
    assert len({g.ready_s for g in blocks}) == shape.num_layers + 1
    assert len({g.ready_s for g in each}) == 7 * shape.num_layers + 1

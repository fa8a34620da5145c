"""The line of latency and bandwidth: found again from its own times, and least in its errors."""

import numpy as np
import pytest
from refusals import refused

from a2lib.theory.latency import OPERATIONS, Line, fit, wire_share

MB = 2**20
SIZES = MB * np.array([0.0625, 1, 10, 100, 1024])


def test_a_line_is_found_again_from_its_times():
    line = Line(38e-6, 3e11)
    times = line.time_s(SIZES)
    found = fit(SIZES, times)
    assert found.overhead_s == pytest.approx(line.overhead_s)
    assert found.bandwidth == pytest.approx(line.bandwidth)
    assert found.residuals(SIZES, 1.5 * times) == pytest.approx([0.5] * 5)
    half = line.half_size
    assert half / line.time_s(half) == pytest.approx(line.bandwidth / 2)


def squares(line, sizes, times):
    return ((line.time_s(sizes) / times - 1) ** 2).sum()


def test_no_line_nearby_has_less_relative_errors():
    times = Line(1e-4, 1e9).time_s(SIZES) * np.random.default_rng(0).uniform(0.7, 1.3, len(SIZES))
    best = fit(SIZES, times)
    least = squares(best, SIZES, times)
    for o in (0.9, 0.999, 1.001, 1.1):
        for w in (0.9, 0.999, 1.001, 1.1):
            other = Line(best.overhead_s * o, best.bandwidth * w)
            assert squares(other, SIZES, times) > least


def test_an_overhead_below_zero_is_none():
    times = [1.0, 2.2, 3.4]
    found = fit([1.0, 2.0, 3.0], times)
    assert found.overhead_s == 0 and found.bandwidth == pytest.approx(0.9, rel=0.05)


def test_what_has_no_line_or_no_share_is_refused():
    refused("two different sizes", fit, [1, 1], [1, 1])
    refused("no bandwidth can be fitted", fit, [1, 100], [100.0, 0.01])
    refused(f"allowed are {', '.join(OPERATIONS)}", wire_share, "gather", 2)
    refused("from 2 on", wire_share, "all_reduce", 1)


def test_the_share_on_the_wire_by_hand():
    assert wire_share("all_reduce", 4) == 1.5 and wire_share("broadcast", 4) == 1
    assert wire_share("all_gather", 4) == wire_share("reduce_scatter", 4) == 0.75

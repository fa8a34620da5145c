"""Rings in closed form against the rings themselves, run step by step."""

import pytest
from rings import run_all_reduce, run_alternate

from a2lib.theory import collectives


def tensors(n, length):
    return [[(i + 1) * 1000 + k for k in range(length)] for i in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("ring", [run_all_reduce, run_alternate])
def test_every_device_ends_with_the_sum(ring, n):
    given = tensors(n, 11)
    total = [sum(column) for column in zip(*given, strict=True)]
    assert ring(given).results == [total] * n
    assert given == tensors(n, 11)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_times_are_those_of_the_rings_run(n):
    S, W = 120, 7.0
    run = run_all_reduce(tensors(n, S))
    assert run.rounds == 2 * (n - 1)
    assert run.elements / W == pytest.approx(collectives.all_reduce_s(S, n, W))
    assert run.elements / W / 2 == pytest.approx(collectives.all_gather_s(S, n, W))
    other = run_alternate(tensors(n, S))
    assert other.rounds == n - 1
    assert other.elements / W == pytest.approx(collectives.alternate_all_reduce_s(S, n, W))
    assert other.sent == [(n - 1) * S] * n

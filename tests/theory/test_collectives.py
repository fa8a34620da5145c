"""Rings in closed form against the rings themselves, run round by round."""

import pytest

from a2lib.theory import collectives

LENGTH, BANDWIDTH = 120, 7.0


def added(one, other):
    return [a + b for a, b in zip(one, other, strict=True)]


def all_reduced(tensors):
    """Return the tensor that each device ends with, and the elements that pass one link.

    In each round device i passes on a chunk: for n - 1 rounds the next device adds it to its own
    (reduce-scatter), for n - 1 more it takes it in the place of its own (all-gather).
    """
    n = len(tensors)
    size = LENGTH // n
    held = []
    for tensor in tensors:
        held.append([tensor[k * size : (k + 1) * size] for k in range(n)])
    rounds = 2 * (n - 1)
    for step in range(rounds):
        messages = [held[i][(i - step) % n] for i in range(n)]
        for i in range(n):
            chunk = (i - 1 - step) % n
            received = messages[i - 1]
            held[i][chunk] = added(held[i][chunk], received) if step < n - 1 else received
    return [sum(chunks, []) for chunks in held], rounds * size


def alternately_reduced(tensors):
    """The same of the handout's other ring: a device passes on the tensor that it received last,
    its own first, and adds what comes in."""
    n = len(tensors)
    sums, passed = list(tensors), list(tensors)
    for _ in range(n - 1):
        passed = [passed[i - 1] for i in range(n)]
        sums = [added(sums[i], passed[i]) for i in range(n)]
    return sums, (n - 1) * LENGTH


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_the_times_are_those_of_rings_that_end_with_the_sum(n):
    tensors = [[1000 * i + k for k in range(LENGTH)] for i in range(n)]
    total = [sum(column) for column in zip(*tensors, strict=True)]
    results, passed = all_reduced(tensors)
    assert results == [total] * n
    assert collectives.all_reduce_s(LENGTH, n, BANDWIDTH) == pytest.approx(passed / BANDWIDTH)
    assert collectives.all_gather_s(LENGTH, n, BANDWIDTH) == pytest.approx(passed / BANDWIDTH / 2)
    results, passed = alternately_reduced(tensors)
    assert results == [total] * n
    alternate_s = collectives.alternate_all_reduce_s(LENGTH, n, BANDWIDTH)
    assert alternate_s == pytest.approx(passed / BANDWIDTH)

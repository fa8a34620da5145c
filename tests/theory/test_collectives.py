"""Rings in closed form against the rings themselves, run round by round."""

import numpy as np
import pytest

from a2lib.theory import collectives

LENGTH, BANDWIDTH = 120, 7.0


def all_reduced(tensors):
    """Return the tensor that each device ends with, and the elements that pass one link.

    In each round device i passes on a chunk: for n - 1 rounds the next device adds it to its own
    (reduce-scatter), for n - 1 more it takes it in the place of its own (all-gather).
    """
    n = len(tensors)
    held, size = tensors.reshape(n, n, LENGTH // n).copy(), LENGTH // n
    device = np.arange(n)
    rounds = 2 * (n - 1)
    for step in range(rounds):
        chunk = (device - step) % n
        received, into = np.roll(held[device, chunk], 1, axis=0), np.roll(chunk, 1)
        if step < n - 1:
            received += held[device, into]
        held[device, into] = received
    return held.reshape(n, LENGTH), rounds * size


def alternately_reduced(tensors):
    """Return the same of the handout's other ring: a device passes on the tensor that it received
    last, its own first, and adds what comes in."""
    n = len(tensors)
    sums, passed = tensors.copy(), tensors
    for _ in range(n - 1):
        passed = np.roll(passed, 1, axis=0)
        sums += passed
    return sums, (n - 1) * LENGTH


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_the_times_are_those_of_rings_that_end_with_the_sum(n):
    tensors = np.random.default_rng(0).integers(1000, size=(n, LENGTH))
    results, passed = all_reduced(tensors)
    assert (results == tensors.sum(axis=0)).all()
    assert collectives.all_reduce_s(LENGTH, n, BANDWIDTH) == pytest.approx(passed / BANDWIDTH)
    assert collectives.all_gather_s(LENGTH, n, BANDWIDTH) == pytest.approx(passed / BANDWIDTH / 2)
    results, passed = alternately_reduced(tensors)
    assert (results == tensors.sum(axis=0)).all()
    alternate_s = collectives.alternate_all_reduce_s(LENGTH, n, BANDWIDTH)
    assert alternate_s == pytest.approx(passed / BANDWIDTH)

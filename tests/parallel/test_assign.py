"""How evenly the sharded optimizer divides, by the bounds it states; no process group."""

import itertools
import random

import pytest

from a2lib.owners import assign

# The bytes of a small Transformer's parameters: an embedding, blocks, a head.
TRANSFORMER = [4000, *[1024, 1024, 1024, 1024, 2730, 2730, 2730, 32, 32] * 6, 32, 4000]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_no_rank_has_more_than_the_mean_and_the_largest(world):
    draw = random.Random(0)
    random_sizes = [draw.randrange(10**6) for _ in range(50)]
    loads, given = [0] * world, []
    for sizes in ([5] * 9, TRANSFORMER, [], [1] * 7, random_sizes):
        # Each of them to ranks that the ones before have loaded.
        assign(sizes, loads)
        given += sizes
        assert max(loads) <= sum(given) / world + max(given)


def loads_of(sizes, ranks, world):
    loads = [0] * world
    for size, rank in zip(sizes, ranks, strict=True):
        loads[rank] += size
    return loads


@pytest.mark.parametrize("world", [2, 3])
def test_against_the_best_division(world):
    draw = random.Random(1)
    for _ in range(10):
        sizes = [draw.randrange(1, 30) for _ in range(7)]
        loads = [0] * world
        assert loads_of(sizes, assign(sizes, loads), world) == loads
        best = sum(sizes)
        for ranks in itertools.product(range(world), repeat=len(sizes)):
            best = min(best, max(loads_of(sizes, ranks, world)))
        assert max(loads) <= (4 / 3 - 1 / (3 * world)) * best

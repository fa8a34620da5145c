"""Gradients all-reduced during the backward, in buckets: the handout's formula.

The formula rests on one assumption: computing a bucket's gradients takes as long as its bytes take
to travel. The link, which also has the overhead of each collective, then never waits after the
first bucket. So s bytes in n buckets end n o + s / (n w) after the backward.
"""

import math
from collections.abc import Iterable

from a2lib.theory.collectives import positive
from a2lib.theory.latency import Line


def overhead_s(total: float, count: float, line: Line) -> float:
    """Return the seconds from the backward's end to the last bucket's, for ``total`` bytes in
    ``count`` equal buckets whose gradients take as long to compute as their bytes to travel."""
    positive(total=total, count=count)
    return count * line.overhead_s + total / (count * line.bandwidth)


def best_size(total: float, line: Line) -> float:
    """Return the bytes of a bucket for which ``overhead_s`` is least, sqrt(s o w). The number of
    buckets is then not whole."""
    positive(total=total, overhead_s=line.overhead_s)
    return math.sqrt(total * line.overhead_s * line.bandwidth)


def count_buckets(sizes: Iterable[float], bucket: float) -> int:
    """Return how many buckets of at most ``bucket`` bytes gradients of these bytes fill, in their
    order. A larger gradient has a bucket of its own."""
    number, held = 0, math.inf
    for size in sizes:
        if held + size > bucket:
            number, held = number + 1, 0.0
        held += size
    return number

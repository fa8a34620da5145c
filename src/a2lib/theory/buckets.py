"""Gradients all-reduced during the backward, in buckets: the handout's formula.

The formula rests on one assumption: computing a bucket's gradients takes as long as its bytes take
to travel. The link, which also has the overhead of each collective, then never waits after the
first bucket. So s bytes in n buckets end n o + s / (n w) after the backward.
"""

import math
from collections.abc import Iterator, Sequence

from a2lib.shapes import Shape
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


def gradients(shape: Shape) -> list[int]:
    """Return the elements of each gradient of the course's Transformer, in the order of the
    backward."""
    d, f = shape.d_model, shape.d_ff
    queries, keys = d * shape.q_width, d * shape.kv_width
    table = shape.vocab_size * d
    feed_forward = [d * f, d * f, d * f, d]  # w2, w3, w1 and their norm
    attention = [queries, keys, keys, queries, d]
    return [table, d, *shape.num_layers * (feed_forward + attention), table]


def fill(sizes: Sequence[float], bucket: float) -> Iterator[list[int]]:
    """Yield the indices of each bucket of at most ``bucket`` bytes. A larger gradient has a bucket
    of its own."""
    held, open_ = 0.0, []
    for i, size in enumerate(sizes):
        if open_ and held + size > bucket:
            yield open_
            held, open_ = 0.0, []
        open_.append(i)
        held += size
    if open_:
        yield open_

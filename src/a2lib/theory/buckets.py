"""Gradients all-reduced during the backward, in buckets: the handout's formula, and a simulation.

The formula rests on one assumption: computing a bucket's gradients takes as long as its bytes take
to travel. The link, which also has the overhead of each collective, then never waits after the
first bucket. So s bytes in n buckets end n o + s / (n w) after the backward. ``simulate`` computes
the same for any arrival of gradients and any cost of a collective.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True)
class Gradient:
    """The number of elements of one parameter's gradient, and its share of the backward's time."""

    elements: int
    share: float


def gradients(shape: Shape) -> list[Gradient]:
    """Return the gradients of the course's Transformer in the order of the backward.

    Shares are by multiply-adds of the matmuls with weights. Gradients of norms and of the embedding
    have none. Attention's own matmuls, a few percent, are left out.
    """
    d, f = shape.d_model, shape.d_ff
    queries, keys = d * shape.q_width, d * shape.kv_width
    table = shape.vocab_size * d
    # (elements, whether a matmul computes it)
    norm = (d, False)
    block = [(d * f, True), (d * f, True), (d * f, True), norm]  # w2, w3, w1
    block += [(queries, True), (keys, True), (keys, True), (queries, True), norm]
    order = [(table, True), norm, *(shape.num_layers * block), (table, False)]
    total = sum(elements for elements, by_matmul in order if by_matmul)
    return [
        Gradient(elements, elements / total if by_matmul else 0.0) for elements, by_matmul in order
    ]


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


def simulate(
    sizes: Sequence[float], ready_s: Sequence[float], bucket: float, cost: Callable[[float], float]
) -> float:
    """Return the seconds from the backward's end to the end of the last bucket.

    One link sends the buckets in order, each when its last gradient is ready.

    sizes: bytes of the gradients, in the order of the backward
    ready_s: when each is ready; the last one at the backward's end
    bucket: the largest bytes of a bucket
    cost: the seconds of a collective of so many bytes
    """
    free = 0.0
    for indices in fill(sizes, bucket):
        size = sum(sizes[i] for i in indices)
        free = max(free, ready_s[indices[-1]]) + cost(size)
    return free - ready_s[-1]


def arrivals(every: Sequence[Gradient], backward_s: float) -> list[float]:
    """Return when each gradient is ready, in a backward of so many seconds."""
    shares = [gradient.share for gradient in every]
    return [backward_s * share for share in itertools.accumulate(shares)]


def block_by_block(ready_s: Sequence[float], blocks: int) -> list[float]:
    """Return ``ready_s`` as it is where each block's gradients arrive together with its last one.

    That is so for compiled blocks. ``ready_s`` are the ``arrivals`` of ``gradients`` of so many
    blocks, with two gradients before the blocks and one after them.
    """
    per_block = (len(ready_s) - 3) // blocks
    together = list(ready_s)
    for first in range(2, 2 + blocks * per_block, per_block):
        last = first + per_block - 1
        together[first : last + 1] = [ready_s[last]] * per_block
    return together


def curve(sizes: Sequence[float], times_s: Sequence[float]) -> Callable[[float], float]:
    """Return the seconds of a collective as a function of its bytes, from measured times.

    Between the points it is a straight line on logarithmic axes. Below them it is the time of the
    smallest size, above them the bandwidth of the largest.
    """
    points, times = np.array(sorted(zip(sizes, times_s, strict=True)), dtype=float).T

    def cost(size: float) -> float:
        if size >= points[-1]:
            return times[-1] * size / points[-1]
        return math.exp(np.interp(math.log(size), np.log(points), np.log(times)))

    return cost

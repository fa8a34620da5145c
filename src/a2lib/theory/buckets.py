"""Gradients that travel during the backward pass, in buckets: the handout's formula, and a clock.

The formula rests on one assumption, that to compute a bucket's gradients takes as long as its bytes
take to travel. Then the link, which has each message's overhead beside, never waits once the first
bucket is there: s bytes in n buckets end n o + s / (n w) after the backward. ``simulate`` runs the
same on a clock, for any arrival of gradients and any cost of a message.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from a2lib.theory.collectives import positive
from a2lib.theory.latency import Line
from a2lib.theory.transformer import Shape


def overhead_s(total: float, count: float, line: Line) -> float:
    """Seconds from the backward's end to the last bucket's, for ``total`` bytes in ``count`` equal
    buckets whose gradients take as long to compute as their bytes to travel."""
    positive(total=total, count=count)
    return count * line.overhead_s + total / (count * line.bandwidth)


def best_size(total: float, line: Line) -> float:
    """Bytes of each bucket of those with the least ``overhead_s``, no whole number of them:
    sqrt(s o w)."""
    positive(total=total, overhead_s=line.overhead_s)
    return total / math.sqrt(total / (line.overhead_s * line.bandwidth))


@dataclass(frozen=True)
class Gradient:
    """``elements`` of one parameter, and the share of the backward that computing them takes."""

    elements: int
    share: float


def gradients(shape: Shape) -> list[Gradient]:
    """Those of the course's Transformer in the order in which a backward pass makes them.

    Shares are by multiply-adds of the products with weights, of which gradients of norms and of the
    embedding have none; attention's own products, a few percent, are left out.
    """
    d, f = shape.d_model, shape.d_ff
    queries, keys = d * shape.q_width, d * shape.kv_width
    # (elements, whether a product makes it)
    block = [(d * f, True), (d * f, True), (d * f, True), (d, False)]  # w2, w3, w1, norm
    block += [(queries, True), (keys, True), (keys, True), (queries, True), (d, False)]
    table = shape.vocab_size * d
    made = [(table, True), (d, False), *(shape.num_layers * block), (table, False)]
    whole = sum(elements for elements, product in made if product)
    return [Gradient(elements, elements / whole if product else 0.0) for elements, product in made]


def fill(sizes: Sequence[float], bucket: float) -> Iterator[list[int]]:
    """The indices of each bucket of at most ``bucket`` bytes; what is larger has its own."""
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
    """Seconds from the backward's end to the last message's, of one link that sends buckets in
    order, each once its last gradient is there.

    ``sizes`` are bytes and ``ready_s`` the times at which gradients are there, in that order, the
    last one at the backward's end; ``cost(bytes)`` is the seconds of a message.
    """
    free = 0.0
    for of_bucket in fill(sizes, bucket):
        free = max(free, ready_s[of_bucket[-1]]) + cost(sum(sizes[i] for i in of_bucket))
    return free - ready_s[-1]


def arrivals(made: Sequence[Gradient], backward_s: float) -> list[float]:
    """When each gradient is there, in a backward of so many seconds."""
    return [backward_s * done for done in itertools.accumulate(one.share for one in made)]


def block_by_block(ready_s: Sequence[float], blocks: int) -> list[float]:
    """``arrivals`` of ``gradients`` of so many blocks where each block's come with its last one, as
    those of a block that is compiled do; before them are two, after them one."""
    each = (len(ready_s) - 3) // blocks
    found = list(ready_s)
    for first in range(2, 2 + blocks * each, each):
        found[first : first + each] = [ready_s[first + each - 1]] * each
    return found


def curve(sizes: Sequence[float], times_s: Sequence[float]) -> Callable[[float], float]:
    """The seconds of a message of any size, from measured ones: straight lines between the points,
    both axes logarithmic; the least time below them, the largest's bandwidth beyond."""
    known, times = np.array(sorted(zip(sizes, times_s, strict=True)), dtype=float).T

    def cost(size: float) -> float:
        if size >= known[-1]:
            return times[-1] * size / known[-1]
        return math.exp(np.interp(math.log(size), np.log(known), np.log(times)))

    return cost

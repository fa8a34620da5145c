"""How large a bucket of gradients should be: the formula of the handout, and a simulation.

Gradients of ``size`` bytes travel in n equal buckets during backward, a bucket when it is full, one
after another; a message takes the time of a ``latency.Line``, overhead o and bandwidth w. If
computing the gradients of a bucket takes as long as its bytes over w, what backward does not hide
is n o + size / (n w): every overhead, and the last bucket's bytes. Its least is at n = sqrt(size /
(o w)), a bucket of sqrt(size o w) bytes.

The simulation drops that "if": it is given when each gradient is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from a2lib.theory.collectives import positive
from a2lib.theory.latency import Line
from a2lib.theory.transformer import Shape


def overhead_s(size: float, bucket: float, line: Line) -> float:
    """The formula: seconds that are not hidden, of ``size`` bytes in buckets of ``bucket`` bytes.

    Raises ValueError unless both are above 0.
    """
    positive(size=size, bucket=bucket)
    n = size / bucket
    return n * line.overhead_s + bucket / line.bandwidth


def best_bucket(size: float, line: Line) -> float:
    """Bytes of the bucket for which the formula is least."""
    positive(size=size)
    return math.sqrt(size * line.overhead_s * line.bandwidth)


@dataclass(frozen=True)
class Gradient:
    """``size`` bytes that are there ``ready_s`` seconds after backward's start."""

    size: float
    ready_s: float


@dataclass(frozen=True)
class Message:
    """A bucket of ``size`` bytes: full, sent and arrived so many seconds after backward's start."""

    size: float
    ready_s: float
    start_s: float
    end_s: float


def simulate(gradients: Sequence[Gradient], bucket: float, line: Line) -> list[Message]:
    """The messages of gradients in the order in which they become ready, in buckets of at most
    ``bucket`` bytes; a larger gradient, or with 0 each one, is a bucket by itself.

    A bucket leaves when its last gradient is there and the one before has arrived. Raises
    ValueError for gradients that are not in order.
    """
    buckets: list[list[Gradient]] = []
    held = math.inf
    for before, gradient in zip([None, *gradients], gradients, strict=False):
        if before is not None and gradient.ready_s < before.ready_s:
            raise ValueError("gradients must be given in the order in which they become ready")
        if held + gradient.size > bucket:
            buckets.append([])
            held = 0.0
        buckets[-1].append(gradient)
        held += gradient.size
    messages: list[Message] = []
    free_s = 0.0
    for one in buckets:
        size, ready_s = math.fsum(g.size for g in one), one[-1].ready_s
        start_s = max(ready_s, free_s)
        free_s = start_s + line.time_s(size)
        messages.append(Message(size, ready_s, start_s, free_s))
    return messages


def exposed_s(messages: Sequence[Message], backward_s: float) -> float:
    """Seconds from backward's end to the last message's arrival, 0 where that was before."""
    return max(0.0, messages[-1].end_s - backward_s)


def gradients(shape: Shape, backward_s: float, *, blocks: bool, width: int = 4) -> list[Gradient]:
    """Those of a transformer in the order of backward: head, blocks from the last on, embedding.

    Backward's time is dealt out by the numbers in the matrices, whose products most of it is; the
    embedding has none and comes at the end. With ``blocks`` a block's gradients are there together,
    as those of a compiled block are. A gradient has ``width`` bytes a number.
    """
    d, ff, table = shape.d_model, shape.d_ff, shape.vocab_size * shape.d_model
    # (numbers, whether a matrix that a product is taken with)
    block = [(d * ff, True)] * 3 + [(d, False)] + [(d * d, True)] * 4 + [(d, False)]
    parts = [[(table, True), (d, False)], *[block] * shape.num_layers, [(table, False)]]
    total = sum(n for part in parts for n, product in part if product)
    found, done = [], 0
    for part in parts:
        whole = done + sum(n for n, product in part if product)
        for n, product in part:
            done += n * product
            share = (whole if blocks else done) / total
            found.append(Gradient(width * n, backward_s * share))
    return found

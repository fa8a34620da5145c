"""The least memory as a function of the number of blocks, and what it costs."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.checkpointing.rows import (
    NARROW,
    Checkpointing,
    block,
    gb,
    predicted,
    runs,
    words,
)
from a2lib.report.chapters.measured import time
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table
from a2lib.theory.checkpointing import BlockBytes, cost, plan

MEASURED = (8, 16, 32)
DEPTHS = (*MEASURED, 64, 128)


def root(layers: int) -> int:
    """The segment of two levels near the root of the number of blocks: a power of two."""
    return 2 ** (int(math.log2(layers)) // 2)


def strategies(layers: int) -> tuple[str, ...]:
    return "block", f"nested:{root(layers)}", "recursive", "chain"


def waiting(strategy: str, layers: int) -> int:
    """Inputs that wait at the peak, gradients kept, beside the block that goes backward."""
    # An input of 1 and a block of nothing else: what is alive is inputs.
    return cost(plan(strategy, layers), BlockBytes(1, 1, 1), fresh_gradients=False).peak - 1


def table(c: Checkpointing, caption: str, name: str) -> Table:
    """By the number of blocks and strategy: inputs that wait, runs of a block, the peak beyond what
    is held, predicted and measured, and the time."""
    lines = []
    for layers in DEPTHS:
        for strategy in strategies(layers):
            row = c.timed(strategy, "kept", NARROW, layers)
            peak, ms = (row.peak_bytes, row.ms) if row is not None else (None, None)
            lines.append([
                layers, words(strategy), waiting(strategy, layers),
                style.digits(runs(strategy, layers)),
                gb(predicted(strategy, "kept", NARROW, layers).peak), gb(peak), time(ms),
            ])  # fmt: skip
    columns = ["blocks", "checkpoint around", "inputs", "runs", "GB predicted", "measured",
               "ms measured"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def sentence(c: Checkpointing) -> Markdown:
    """What the least gains at the largest measured depth over one block at a time, and costs."""
    layers = MEASURED[-1]
    b = block(NARROW)
    told = []
    for strategy in strategies(layers)[1:]:
        less = (predicted("block", "kept", NARROW).peak
                - predicted(strategy, "kept", NARROW).peak)  # fmt: skip
        each = style.digits(runs(strategy, layers))
        told.append(f"{words(strategy)} by {gb(less)} GB for {each} runs of each block")
    text = (
        f"With {layers} blocks in bf16 with FlashAttention and gradients kept, one block at a time "
        f"lets {waiting('block', layers)} inputs of {gb(b.input)} GB wait beside the {gb(b.peak)} "
        "GB of the block that goes backward. By the prediction the peak is lower with "
        f"{listed(told)}."
    )
    found = [(s, c.timed(s, "kept", NARROW, layers)) for s in strategies(layers)]
    if not all(row is not None for _, row in found):
        return Markdown(f"{text} {c.not_yet('these')}")
    base = found[0][1]
    measured = [
        f"{gb(abs(base.peak_bytes - row.peak_bytes))} GB "
        f"{'lower' if row.peak_bytes < base.peak_bytes else 'higher'} at "
        f"{row.ms / base.ms:.2f} times the time ({words(s)})" for s, row in found[1:]
    ]  # fmt: skip
    return Markdown(f"{text} Measured it is {listed(measured)}.")


def alike(c: Checkpointing) -> list[int]:
    """The measured depths, if the peak with the first input alone is the same at all of them, to a
    hundredth; else none, and none of fewer than two."""
    rows = {n: c.timed("chain", "kept", NARROW, n) for n in MEASURED}
    sizes = {n: row.peak_bytes for n, row in rows.items() if row is not None}
    if len(sizes) < 2 or max(sizes.values()) > 1.01 * min(sizes.values()):
        return []
    return list(sizes)


def constant(c: Checkpointing) -> Markdown:
    """Whether the peak with the first input alone stays the same at every depth, and what its time
    does, as measured; what lacks."""
    rows = {n: [c.timed(s, "kept", NARROW, n) for s in ("chain", "block")] for n in MEASURED}
    there = [n for n, pair in rows.items() if None not in pair]
    lacks = [str(n) for n in MEASURED if n not in there]
    told = []
    if len(there) > 1:
        sizes = [rows[n][0].peak_bytes for n in there]
        times = [f"{rows[n][0].ms / rows[n][1].ms:.2f}" for n in there]
        told.append(
            f"With the first input alone the measured peak is {'' if alike(c) else 'not '}the same "
            f"at {listed(list(map(str, there)))} blocks, {style.between(sizes, gb)} GB, and a step "
            f"takes {listed(times)} times as long as with one block at a time."
        )
    if lacks:
        told.append(c.not_yet(f"the strategies of least memory at {listed(lacks)} blocks"))
    return Markdown(" ".join(told))


def fresh(c: Checkpointing) -> Markdown:
    """The same strategies where the backward makes the gradients: what they gain there."""
    peaks = {s: predicted(s, "fresh", NARROW).peak for s in strategies(MEASURED[-1])}
    gain = peaks["block"] - min(peaks.values())
    text = (
        "Where the backward makes its gradients, these strategies gain "
        + (f"{gb(gain)} GB" if gain else "nothing")
        + f" by the prediction: the peak is {gb(peaks['block'])} GB beyond what stays, however few "
        "inputs are kept."
    )
    rows = [c.timed(s, "fresh", NARROW) for s in strategies(MEASURED[-1])]
    if not all(row is not None for row in rows):
        return Markdown(f"{text} {c.not_yet('these peaks')}")
    sizes = [row.peak_bytes for row in rows]
    return Markdown(f"{text} Measured: {style.between(sizes, gb)} GB.")

"""The best size of a bucket of gradients: the handout's formula, and a clock that knows times."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from a2lib.report import panels, style
from a2lib.report.chapters.collectives import line
from a2lib.report.chapters.collectives.answer import MAIN
from a2lib.report.chapters.collectives.rows import MB, VIEW, Collectives, digits, megabytes
from a2lib.report.metrics import timed_row
from a2lib.report.panels import Measure
from a2lib.report.style import Chart, Look, Looks, listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.buckets import (
    arrivals,
    best_count,
    best_size,
    curve,
    gradients,
    overhead_s,
    simulate,
)
from a2lib.theory.latency import Line
from a2lib.theory.transformer import SIZES, parameter_count

MODEL, TITLE = "xl25", "xl of 2025"
BYTES = 4 * parameter_count(SIZES[MODEL])
TRIED = tuple(n * MB for n in (1, 10, 25, 100, 1000))
DRAWN = tuple(2**k for k in range(18, 34))
# A backward pass as it is trained: 16 bits by autocast, each block compiled.
STEP = {"model": MODEL, "context": 512, "batch": 4, "mode": "train-step", "precision": "bf16",
        "attention": "flash", "compile": "blocks", "phase": "backward"}  # fmt: skip
LOOKS = Looks(
    formula=Look("formula", "#0072b2", "", short="formula"),
    line=Look("clock, times of the line", "#00825f", "^", short="clock, line"),
    measured=Look("clock, measured times", "#d55e00", "o", short="clock, measured"),
    trained=Look("the same, backward as measured", "#b0558a", "s", short="measured backward"),
)


def ways(c: Collectives) -> dict[str, Callable[[float], float]]:
    """How each line of the figure gives the exposed milliseconds of a bucket's size, as far as its
    rows are there."""
    fitted = line.fitted(c, MAIN, "ms_queued")
    if fitted is None or fitted.overhead_s == 0:
        return {}
    points = line.points(c, MAIN, "ms_queued")
    cost = curve(list(points["size"]), list(points["s"]))
    made = gradients(SIZES[MODEL])
    sizes = [4 * one.elements for one in made]
    # The assumption: computing takes as long as the bytes do.
    alike = [sum(sizes[: i + 1]) / fitted.bandwidth for i in range(len(sizes))]
    found = {
        "formula": lambda b: 1e3 * overhead_s(BYTES, max(1.0, BYTES / b), fitted),
        "line": lambda b: 1e3 * simulate(sizes, alike, b, fitted.time_s).exposed_s,
        "measured": lambda b: 1e3 * simulate(sizes, alike, b, cost).exposed_s,
    }
    row = backward(c)
    if row is not None:
        ready = arrivals(made, float(row.ms) / 1e3)
        found["trained"] = lambda b: 1e3 * simulate(sizes, ready, b, cost).exposed_s
    return found


def backward(c: Collectives):
    """The published device's row of the model's backward pass; None where there is none."""
    rows, _ = c.read("benchmark")
    return timed_row(rows, **STEP, capture=False)


def sentence(c: Collectives) -> Markdown:
    """The best size by the formula and by the clock, and what each says of the other."""
    fitted, found = line.fitted(c, MAIN, "ms_queued"), ways(c)
    if not found:
        return Markdown(c.not_yet("the overhead and the bandwidth that the formula needs"))
    count, size = best_count(BYTES, fitted), best_size(BYTES, fitted)
    text = (
        f"For the {BYTES / 1e9:.2f} GB of fp32 gradients of the {TITLE}, sent with {_ranks()}, "
        f"o = {digits(fitted.overhead_s * 1e6)} µs and w = {digits(fitted.bandwidth / 1e9)} GB/s, "
        f"the formula wants {count:.0f} buckets of {digits(size / MB)} MB, which leave "
        f"{digits(found['formula'](size))} ms after the backward."
    )
    best = {name: min(DRAWN, key=at) for name, at in found.items()}
    text += (
        f" On the clock, where a message takes what was measured, the best of the sizes drawn is "
        f"{megabytes(best['measured'])} MB with {digits(found['measured'](best['measured']))} ms, "
        f"and at the formula's size it has {digits(found['measured'](size))} ms, "
        f"{style.signed(found['measured'](size) / found['formula'](size) - 1, 0)} against the "
        "formula."
    )
    row = backward(c)
    if row is None:
        return Markdown(f"{text} {c.not_yet('the backward pass of this model')}")
    wire = BYTES / fitted.bandwidth * 1e3
    text += (
        f" The assumption itself, that the backward takes as long as its bytes ({digits(wire)} "
        f"ms), does not hold: it takes {digits(row.ms)} ms (batch 4 of 512 tokens, bf16, blocks "
        f"compiled). Then {megabytes(best['trained'])} MB are best, with "
        f"{digits(found['trained'](best['trained']))} ms, and "
        f"{digits(found['trained'](size))} ms are left at the formula's size."
    )
    return Markdown(text)


def _ranks() -> str:
    return VIEW.looks.of(MAIN).label


def table(c: Collectives, caption: str, name: str) -> Table:
    """Exposed milliseconds by the size of a bucket, each way, for the handout's sizes."""
    found, lines = ways(c), []
    fitted = line.fitted(c, MAIN, "ms_queued")
    for bucket in TRIED if found else ():
        cells = [digits(found[way](bucket)) if way in found else MISSING for way in LOOKS]
        lines.append([megabytes(bucket), _messages(fitted, bucket), *cells])
    columns = ["bucket, MB", "messages", *(LOOKS.short(way) for way in LOOKS)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0)


def _messages(fitted: Line, bucket: float) -> int:
    sizes = [4 * one.elements for one in gradients(SIZES[MODEL])]
    return simulate(sizes, [0.0] * len(sizes), bucket, fitted.time_s).messages


def figure(c: Collectives) -> Chart:
    """Exposed milliseconds against the size of a bucket, a line for each way."""
    found = ways(c)
    if not found:
        return panels.empty()

    def draw(figure):
        ax = figure.subplots()
        for way, at in found.items():
            look = LOOKS.of(way)
            ax.plot(DRAWN, [max(at(b), 1e-3) for b in DRAWN], color=look.colour, linewidth=1.5,
                    marker=look.marker, markersize=4)  # fmt: skip
        panels.doubling_axis(ax)
        panels.values_axis(ax, Measure("ms", base=10))
        ax.set(xlabel="bytes of a bucket", ylabel="ms after the backward")
        panels.legend(figure, panels.handles(list(found), LOOKS), 2)

    return Chart(draw, height=3.1 + panels.legend_height(len(found), 2))


def limits(c: Collectives) -> Markdown:
    """Which of the formula's assumptions fails, and by how much."""
    found = ways(c)
    if not found:
        return Markdown(c.not_yet("where the formula fails"))
    told = []
    for bucket in TRIED:
        said, clock = found["formula"](bucket), found["measured"](bucket)
        told.append(f"{style.signed(clock / said - 1, 0)} at {megabytes(bucket)} MB")
    return Markdown(
        f"Against the formula the clock with measured times has {listed(told)}. Two things are "
        "in that: one bandwidth for all sizes, which the residuals above show it is not, and "
        "equal buckets, which gradients are not: a matrix larger than the bucket travels alone."
    )

"""Whether each all-gather is done when its unit's turn comes: predicted, counted and drawn."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import pandas as pd
from matplotlib.patches import Patch

from a2lib.report import metrics, panels
from a2lib.report.chapters import profile
from a2lib.report.chapters.fsdp.rows import (
    BATCH,
    COMPUTES,
    CONTEXT,
    MODELS,
    WORLD_SIZE,
    Fsdp,
    sizes,
)
from a2lib.report.chapters.measured import time
from a2lib.report.style import Chart, listed
from a2lib.report.tables import Markdown, Table
from a2lib.theory import fsdp as theory
from a2lib.theory.collectives import all_gather_s, all_reduce_s
from a2lib.theory.transformer import SIZES, forward_flops_by_part

PASSES = ("forward", "backward")
WAYS = {False: "launched", True: "captured"}
GATHER, COMPUTE, WAITED = "#0072b2", "#808080", "#d55e00"
LONGER = 1.5  # a launched gather that lasts so many times a replayed one waits for a host
# What a mark between two kernels takes by itself: a wait below it is none.
MARK_MS = 0.01
LATEST, FEW = 8, 3


@dataclass(frozen=True)
class Expected:
    """Milliseconds of one block: its all-gather, its reduce-scatter, its forward and backward."""

    gather: float
    scatter: float
    forward: float
    backward: float


def expected(c: Fsdp, model: str) -> Expected:
    """By the bytes over the link and the operations over the rate that large products reach: the
    fitted line of all-reduces where there is one, else the link as its maker states it."""
    block = sizes(model).block
    fitted = c.line()

    def sent(width: int) -> float:
        size = width * block
        if fitted is None:
            return 1e3 * all_gather_s(size, WORLD_SIZE, c.link * 1e9)
        # The line is in bytes of an all-reduce, which sends twice as many of them.
        ratio = all_gather_s(1, WORLD_SIZE, 1) / all_reduce_s(1, WORLD_SIZE, 1)
        return 1e3 * (fitted.overhead_s + ratio * size / fitted.bandwidth)

    parts = forward_flops_by_part(SIZES[model], BATCH, CONTEXT, causal=True)
    flops = (sum(parts.values()) - parts["lm_head"]) / SIZES[model].num_layers
    forward = flops / c.rate / 1e9
    return Expected(sent(COMPUTES), sent(theory.WIDE), forward, 2 * forward)


def prediction(c: Fsdp) -> Markdown:
    """What should hide behind what, before anything is traced."""
    told = []
    for model, words in MODELS.items():
        e, size = expected(c, model), COMPUTES * sizes(model).block
        told.append(
            f"a block of {words} ({size / 1e6:.0f} MB in bf16) is gathered in {time(e.gather)} ms, "
            f"beside a forward of at least {time(e.forward)} ms, and in backward gathered and "
            f"reduced in {time(e.gather + e.scatter)} ms, beside {time(e.backward)} ms"
        )
    by = "the line fitted to all-reduces" if c.line() else f"links of {c.link:.0f} GB/s"
    reached = "that large products reach" if c.tflops.get("bf16") else "that the maker states"
    return Markdown(
        f"By {by}, and by the {c.rate:.0f} TFLOP/s {reached}, {'; '.join(told)}. Where a gather is "
        "shorter than the block it hides behind, all are in time but the root's and block 0's."
    )


def in_time(row: dict) -> bool:
    """Whether the gather had ended when the unit's turn came, or the wait was as short as none."""
    return row["slack_ms"] >= 0 or row["waited_ms"] <= MARK_MS


def waited(rows: list[dict]) -> float:
    """Milliseconds that the computation stood for gathers in the step."""
    return sum(row["waited_ms"] for row in rows if not in_time(row))


def sentence(c: Fsdp, model: str) -> str:
    """How many were in time, launched and captured; "" without a table."""
    told = []
    for capture, way in WAYS.items():
        rows = c.gathers(model, capture)
        if not rows:
            continue
        good = sum(map(in_time, rows))
        text = f"{way}, {good} of {len(rows)} all-gathers were in time"
        late = waited(rows)
        if good < len(rows):
            names = [f"{row['unit']} in {row['pass']}" for row in rows if not in_time(row)]
            few = f"that of {listed(names)}" if len(names) <= FEW else f"the first is {names[0]}"
            text += f" and the step stood {time(late)} ms for the others ({few})"
        told.append(text)
    return "; ".join(told)


def answer(c: Fsdp) -> Markdown:
    """fsdp_accounting (b)."""
    told = [f"For {words}: {found}." for model, words in MODELS.items()
            if (found := sentence(c, model))]  # fmt: skip
    return Markdown(" ".join(told) or c.not_yet("whether each all-gather is done in time"))


def why(c: Fsdp) -> Markdown:
    """The gathers' own length beside what they hide behind, as measured, and where they wait."""
    told = []
    for model, words in MODELS.items():
        rows = c.gathers(model, True) or c.gathers(model, False)
        if not rows:
            continue
        parts, times = [], []
        for pass_ in PASSES:
            own = [row for row in rows if row["pass"] == pass_ and row["unit"] != "root"]
            if own:
                gather = statistics.median(r["gather_end_ms"] - r["gather_start_ms"] for r in own)
                compute = statistics.median(
                    r["compute_end_ms"] - r["compute_start_ms"] for r in own
                )
                parts.append(f"in {pass_} {time(gather)} ms beside {time(compute)} ms")
                times.append(f"{gather / expected(c, model).gather:.1f}")
        way = WAYS[bool(c.gathers(model, True))]
        told.append(f"Of {words}, {way}, the median all-gather takes {listed(parts)} of a block, "
                    f"{listed(times)} times the prediction.")  # fmt: skip
    if told:
        told.append("Between a gather's marks lies the cast of the rank's own rows as well, and "
                    "cast, transfer and the block's kernels share the GPU.")  # fmt: skip
    return Markdown(" ".join(told) or c.not_yet("how long a gather takes beside a block"))


def waits(c: Fsdp) -> Markdown:
    """Why the table of steps may have a wait that rank 0's gathers do not show."""
    told = []
    for model, words in MODELS.items():
        for capture, way in WAYS.items():
            rows, row = c.gathers(model, capture), c.row(model=model, capture=capture)
            if rows and row is not None and not pd.isna(row.ms_waited):
                own = sum(one["waited_ms"] for one in rows)
                told.append(f"of {words}, {way}, {time(row.ms_waited)} and {time(own)} ms")
    if not told:
        return Markdown(c.not_yet("what each rank waited"))
    return Markdown(
        "What the rank that waits most waited, the median of a few steps, and rank 0 in the one "
        f"step whose gathers are listed above: {listed(told)}, the marks' own time included. All "
        "of these begin from rest, where timed steps follow one another and the host may be ahead. "
        "A gather ends once both hosts have issued it. Where the first is much longer, one host is "
        "behind the other, and the GPU of the quicker one stands: no gather is slow by itself then."
        + "".join(held_up(c, model) for model in MODELS)
    )


def held_up(c: Fsdp, model: str) -> str:
    """Where launched gathers last longer than the same replayed, and whether the step does."""
    told = []
    for pass_ in PASSES:
        launched, replayed = (
            [row["gather_end_ms"] - row["gather_start_ms"] for row in c.gathers(model, capture)
             if row["pass"] == pass_ and row["unit"] != "root"]
            for capture in WAYS
        )  # fmt: skip
        if launched and replayed:
            one, other = statistics.median(launched), statistics.median(replayed)
            if one > LONGER * other:
                told.append(f"{time(one)} ms in {pass_}, replayed {time(other)}")
    if not told:
        return ""
    text = (
        f" Of {MODELS[model]}, launched, the median all-gather lasts {listed(told)}: begun on rank "
        "0, it waits for one of the two hosts"
    )
    rows = [c.row(model=model, capture=capture) for capture in WAYS]
    if None not in rows and metrics.level(*rows):
        text += (
            ". One after another, its launched steps are level with replayed ones, "
            f"{time(rows[0].ms)} and {time(rows[1].ms)} ms: there the hosts are ahead"
        )
    return f"{text}."


def summary(c: Fsdp, caption: str, label: str) -> Table:
    """A line for each pass of each step that was looked at."""
    lines = []
    for model, words in MODELS.items():
        for capture, way in WAYS.items():
            for pass_ in PASSES:
                rows = [row for row in c.gathers(model, capture) if row["pass"] == pass_]
                if not rows:
                    continue
                slack = [row["slack_ms"] for row in rows]
                found = (min(slack), statistics.median(slack), waited(rows))
                lines.append([f"{words}, {way}", pass_, len(rows), sum(map(in_time, rows)),
                              *map(_ms, found)])  # fmt: skip
    columns = ["step", "pass", "all-gathers", "in time", "least slack, ms", "median", "waited, ms"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2, keys=2)


def _ms(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def latest(c: Fsdp, model: str, capture: bool, caption: str, label: str) -> Table:
    """The gathers with the least slack, in their order in the step."""
    rows = c.gathers(model, capture)
    few = sorted(rows, key=lambda row: row["slack_ms"])[:LATEST]
    names = ("gather_start_ms", "gather_end_ms", "turn_ms", "compute_start_ms", "slack_ms",
             "waited_ms")  # fmt: skip
    lines = [[row["unit"], row["pass"], *(_ms(row[name]) for name in names)]
             for row in rows if row in few]  # fmt: skip
    columns = ["unit", "pass", "gather starts", "ends", "unit's turn", "computes", "slack",
               "waited"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2, keys=2)


def figure(c: Fsdp, model: str) -> Chart:
    """All-gathers above what the units compute, launched and captured, forward and backward."""
    shown = {way: rows for capture, way in WAYS.items() if (rows := c.gathers(model, capture))}
    if not shown:
        return panels.empty()

    def draw(figure):
        axes = figure.subplots(2 * len(shown), 1, squeeze=False)[:, 0]
        places = iter(axes)
        for way, rows in shown.items():
            for pass_ in PASSES:
                ax = next(places)
                own = [row for row in rows if row["pass"] == pass_]
                _lanes(ax, own)
                ax.set_title(f"{way}, {pass_}")
        axes[-1].set_xlabel("ms from the step's begin")
        named = ((GATHER, "all-gathers"), (COMPUTE, "computes"), (WAITED, "waited"))
        panels.legend(figure, [Patch(color=color, label=text) for color, text in named], columns=3)

    return Chart(draw, height=0.7 + 1.25 * 2 * len(shown))


def _lanes(ax, rows: list[dict]) -> None:
    def bars(start: str, end: str, wanted=lambda row: True) -> list[tuple[float, float]]:
        return [(row[start], row[end] - row[start]) for row in rows if wanted(row)]

    edge = {"edgecolor": "#ffffff", "linewidth": 0.4}
    for place, what, color in ((1.1, "gather", GATHER), (0.1, "compute", COMPUTE)):
        found = bars(f"{what}_start_ms", f"{what}_end_ms")
        ax.broken_barh(found, (place, 0.8), facecolor=color, **edge)
    late = bars("turn_ms", "compute_start_ms", lambda row: not in_time(row))
    ax.broken_barh(late, (0.1, 0.8), facecolor=WAITED)
    ax.set_ylim(0, 2)
    ax.set_yticks([1.5, 0.5], ["gathers", "computes"])
    ax.grid(axis="y", visible=False)


def strip(c: Fsdp, model: str) -> Chart:
    """Kernels by stream against time, of rank 0's GPU, around the begin of backward."""
    return profile.strip(c.strip(model))

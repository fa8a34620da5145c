"""Times along the batch and along the width, with the formula's and its threshold."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from a2lib.report import panels, style
from a2lib.report.chapters.parallelism_measured.answer import (
    mesh_name,
    predicted_threshold,
    schemes,
)
from a2lib.report.chapters.parallelism_measured.rows import Beside, Machine, costs
from a2lib.report.panels import Measure
from a2lib.report.style import Chart

PASS = "backward"  # the one in which every scheme sends
LINES = {
    "ms": ("together, measured", "#d55e00", "o", 2.0),
    "ms_without": ("products alone", "#0072b2", "^", 1.2),
    "ms_communication": ("messages alone", "#00825f", "v", 1.2),
}
FORMULA, THRESHOLD = "the longer, predicted", "threshold, predicted"
LEGEND = 2
PANEL = 2.35  # inches


def by_batch(p: Beside, backend: str) -> Chart:
    """A panel for each number of ranks, scheme and mesh: backward by tokens of the batch."""
    found = [
        (m, scheme, mesh, rows)
        for m in p.machines
        if m.backend == backend
        for scheme, mesh in schemes(p, m)
        if len(rows := _rows(p, m, scheme, mesh, "tokens")) > 1
    ]
    return _grid(found, "tokens")


def by_width(p: Beside) -> Chart:
    """A panel for each machine: tensor parallelism's backward by d_ff."""
    found = [
        (m, "tp", (1, m.world_size), rows)
        for m in p.machines
        if len(rows := _rows(p, m, "tp", (1, m.world_size), "d_ff")) > 1
    ]
    return _grid(found, "d_ff")


def _rows(p: Beside, m: Machine, scheme: str, mesh: tuple[int, int], along: str) -> pd.DataFrame:
    """The rows of one panel: of the main width, or of the batch that has most widths."""
    rows = p.of(m, scheme=scheme, phase=PASS, mesh="x".join(map(str, mesh)))
    if along == "tokens":
        rows = rows[rows["d_ff"] == m.layer.d_ff]
    elif len(rows):
        rows = rows[rows["tokens"] == rows.groupby("tokens").size().idxmax()]
    return rows.sort_values(along)


def _grid(found: list[tuple], along: str) -> Chart:
    if not found:
        return panels.empty()
    places = _places([one[0] for one in found] if along == "tokens" else [None] * len(found))
    down, across = 1 + max(i for i, _ in places), min(2, len(found))

    def draw(figure):
        axes = figure.subplots(down, across, squeeze=False)
        for (i, j), (m, scheme, mesh, rows) in zip(places, found, strict=True):
            _panel(axes[i, j], m, scheme, mesh, rows, along)
            axes[i, j].set_title(f"{mesh_name(scheme, mesh)}\n{m.label}")
            axes[i, j].set_xlabel(along)
        for ax in axes.flat:
            if not ax.lines:
                ax.set_axis_off()
        for row in axes:
            row[0].set_ylabel("ms")
        panels.legend(figure, _handles(), LEGEND)

    return Chart(draw, height=PANEL * down + panels.legend_height(len(LINES) + 2, LEGEND))


def _places(groups: list) -> list[tuple[int, int]]:
    """Row and column of each panel, two in a row; another group begins another row."""
    places: list[tuple[int, int]] = []
    for k, group in enumerate(groups):
        i, j = places[-1] if places else (-1, 1)
        places.append((i, 1) if j == 0 and group == groups[k - 1] else (i + 1, 0))
    return places


def _panel(ax, m: Machine, scheme: str, mesh: tuple[int, int], rows, along: str) -> None:
    x = rows[along].astype(float)
    for column, (_, colour, marker, width) in LINES.items():
        ax.plot(x, rows[column].astype(float), color=colour, marker=marker, markersize=4,
                linewidth=width)  # fmt: skip
    # A threshold is of one axis: of the width for tensor parallelism, else of the batch.
    own = (scheme == "tp") == (along == "d_ff")
    at = predicted_threshold(m, scheme, mesh, PASS) if own else math.inf
    formula = dict(zip(x, rows["floor"], strict=True))
    if x.min() < at < x.max():
        formula[at] = _floor(m, rows.iloc[0], along, at)
    ax.plot(*zip(*sorted(formula.items()), strict=True), color=style.INK, linewidth=1.2,
            linestyle=(0, (4, 2)))  # fmt: skip
    panels.values_axis(ax, Measure("ms", base=10))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    panels.doubling_axis(ax)
    low, high = ax.get_xlim()
    if low < at < high:
        ax.axvline(at, color=style.DIM, linewidth=1, linestyle=":")


def _floor(m: Machine, row, along: str, at: float) -> float:
    """The longer of computation and communication, ms, where the formula has its knee."""
    there = {"tokens": row["tokens"], "d_ff": row["d_ff"], along: at}
    passes = costs(row, m.of(there["tokens"], there["d_ff"]))
    return 1e3 * m.layers * sum(max(c.compute_s, c.data_s + c.tensor_s) for c in passes)


def _handles() -> list[Line2D]:
    made = [
        Line2D([], [], color=colour, marker=marker, markersize=4, linewidth=width, label=label)
        for label, colour, marker, width in LINES.values()
    ]
    dashed = {"color": style.INK, "linewidth": 1.2, "linestyle": (0, (4, 2))}
    dotted = {"color": style.DIM, "linewidth": 1, "linestyle": ":"}
    return [*made, Line2D([], [], **dashed, label=FORMULA),
            Line2D([], [], **dotted, label=THRESHOLD)]  # fmt: skip

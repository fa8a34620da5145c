"""What the figures are made of: lines with markers, axes with few ticks, names, legends.

The names of lines stand where the lines end if there is room beside the panels, else in a legend.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from a2lib.report import style
from a2lib.report.metrics import pick
from a2lib.report.style import DIM, INK

TOKENS = "sequence length (tokens)"
REFERENCE_LINE = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3))}
LEGEND_ROW = 0.235  # inches that a row of a legend takes
ROOM = 0.235  # share of the width that names at the ends of lines take
LINE = 1.28  # height of a line of text, in font sizes


def lines(ax, rows: pd.DataFrame, measure: str, dashes="-", markers: bool = True) -> list:
    """A line per implementation against sequence length; its last points, for `name_ends`.

    Returns (x, y, name) of the last point that has a value, in data coordinates.
    """
    ends = []
    for name in style.implementations(rows["implementation"]):
        line = pick(rows, implementation=name).sort_values("seq_len")
        x, y = line["seq_len"].astype(float), line[measure].astype(float)
        if not y.notna().any():
            continue
        look = style.look(name)
        ax.plot(x, y, color=look.colour, linestyle=dashes, zorder=3 if look.ours else 2,
                marker=look.marker if markers else "", markersize=4.6 if look.ours else 3.6,
                linewidth=2.2 if look.ours else 1.3)  # fmt: skip
        last = y.last_valid_index()
        ends.append((x[last], y[last], name))
    return ends


def tokens_axis(ax) -> None:
    """Powers of two along the bottom, at most six of them."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_tokens(value)))
    low, high = ax.get_xlim()
    ticks = [2.0**n for n in range(0, 24) if low <= 2.0**n <= high]
    ax.set_xticks(ticks[-1::-2][::-1] if len(ticks) > 5 else ticks)
    ax.minorticks_off()


def values_axis(ax, measure: str) -> None:
    """The scale that suits a measure, upwards, without minor ticks."""
    if measure == "tflops":
        # A point at zero sets the bottom and leaves the top free, which panels share.
        ax.update_datalim([(ax.get_xticks()[0], 0)])
        ax.autoscale_view()
        ax.yaxis.set_major_locator(MaxNLocator(5))
        return
    ax.set_yscale("log", base=10 if measure == "ms" else 2)
    bottom, top = ax.get_ylim()
    if measure == "ms" and top < 30 * bottom:  # too few powers of ten to read a value from
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if measure == "speedup":
        ax.axhline(1, color=INK, linewidth=0.8)
    ax.yaxis.set_minor_locator(NullLocator())
    text = round_size if measure == "peak_bytes" else plain
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def places(wanted: list[float], line: float, low: float, high: float) -> list[float]:
    """Heights for labels of height `line` near the heights they want, between low and high.

    Returned in the order of `wanted`. No two touch, their order from bottom to top is that of what
    they want, and labels that would touch share the mean of what they want: pools of adjacent
    violators. Where there is no room for all between low and high, they run over high.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    pools: list[list[float]] = []  # [sum of the middles wanted, how many]
    for i in order:
        pools.append([min(max(wanted[i], low + line / 2), high - line / 2), 1])
        while len(pools) > 1:
            (below, m), (above, n) = pools[-2:]
            if below / m + line * m / 2 <= above / n - line * n / 2:
                break
            pools[-2:] = [[below + above, m + n]]
    heights, floor = [], low
    for total, n in pools:
        bottom = min(total / n - line * n / 2, high - line * n)
        bottom = max(bottom, floor)
        heights += [bottom + line * (k + 0.5) for k in range(int(n))]
        floor = bottom + line * n
    found = [0.0] * len(wanted)
    for i, height in zip(order, heights, strict=True):
        found[i] = height
    return found


def name_ends(figure, ax, ends: list, labels: dict[str, str] | None = None) -> None:
    """Write the name of each line beside the panel, with a hairline from the line's end.

    `ends` are (x, y, implementation); `labels` replaces the short names. Call it when the layout
    is final; the panel's right side must have ROOM.
    """
    if not ends:
        return
    pixels = figure.dpi / 72
    line = 10.5 * LINE * pixels
    panel = ax.get_window_extent()
    points = [ax.transData.transform((x, y)) for x, y, _ in ends]
    heights = places([y for _, y in points], line, panel.y0 - line / 2, panel.y1 + line)
    start = panel.x1 + 13 * pixels
    to_figure = figure.transFigure.inverted().transform
    for (x, y), height, (_, _, name) in zip(points, heights, ends, strict=True):
        look = style.look(name)
        (x0, y0), (x1, y1) = to_figure([(x, y), (start, height)])
        bend = to_figure((max(panel.x1, x + 4 * pixels), y))[0]
        figure.add_artist(Line2D([x0, bend, x1], [y0, y0, y1], color=look.colour, linewidth=0.7))
        figure.add_artist(Line2D([x1], [y1], color=look.colour, marker=look.marker, linestyle="",
                                 markersize=5))  # fmt: skip
        words = (labels or {}).get(name, style.SHORT.get(name, name))
        figure.text(*to_figure((start + 6 * pixels, height)), words, va="center_baseline",
                    fontweight="bold" if look.ours else "normal")  # fmt: skip


def legend(figure, names: list[str], extra: list | None = None, columns: int = 4) -> None:
    """The implementations by their short names above the panels, then `extra` handles."""
    handles = [
        Line2D([], [], color=style.look(n).colour, marker=style.look(n).marker, markersize=5,
               linewidth=2.2 if style.look(n).ours else 1.3, label=style.SHORT.get(n, n))
        for n in names
    ] + (extra or [])  # fmt: skip
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False,
                      columnspacing=1.0, handlelength=1.5, handletextpad=0.5)  # fmt: skip


def legend_height(entries: int, columns: int = 4) -> float:
    """Inches that a legend of so many entries takes."""
    return LEGEND_ROW * -(-entries // columns) + 0.2 if entries else 0.0


def nothing(ax, rows: pd.DataFrame | None = None) -> None:
    """Say in place of a panel why it is empty."""
    reasons = sorted(set(rows["status"])) if rows is not None and len(rows) else []
    text = "no times: " + ", ".join(reasons) if reasons else "not measured yet"
    ax.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", color=DIM)
    ax.set_axis_off()


def empty() -> style.Chart:
    """A figure of no rows."""
    return style.Chart(lambda figure: nothing(figure.subplots()), height=1.2)


def numbers(rows: pd.DataFrame, column: str) -> pd.Series:
    """A column as floats, NaN where it is blank or where the rows do not have it yet."""
    if column not in rows:
        return pd.Series(np.nan, rows.index, dtype="float64")
    return pd.to_numeric(rows[column], errors="coerce").astype("float64")


def round_size(n_bytes: float) -> str:
    number, unit = style.size(n_bytes).split()
    return f"{float(number):g} {unit}"


def plain(value: float) -> str:
    return f"{value:g}" if value < 1e5 else f"{value:.0e}"


def short_tokens(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"

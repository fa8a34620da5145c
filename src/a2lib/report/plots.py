"""Figures for the rows of any section: lines that are named where they end, bars that carry their
numbers, maps of ratios.

Each function draws into an axes of a ``Chart`` and returns nothing but what ``name_ends`` needs. At
most eight marks a panel; linear axes from zero unless a range of ten times or more is the message.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.ticker import LogLocator, MaxNLocator

from a2lib.report.panels import REFERENCE_LINE, thickness
from a2lib.report.style import DIM, INK, PAPER, Chart, Looks
from a2lib.report.units import digits

# Ours ahead by more than 2, by more than 1.25, by less; level; a peer ahead likewise.
HEAT = ("#f0ad78", "#f6cfab", "#fbe9da", "#eeeeee", "#dce9f7", "#b5d2f0", "#86b6e6")
HEAT_STEPS = (1.02, 1.25, 2.0)
ROOM = 0.235  # share of the width that names beside the panels take


def lines(ax, rows: pd.DataFrame, x: str, y: str, by: str, looks: Looks) -> list:
    """A line per value of ``by``, with a gap where a row has no ``y``; returns the ends of the
    lines, (x, y, name), for ``name_ends``."""
    ends = []
    for name in looks.order(rows[by]):
        line = rows[rows[by] == name].sort_values(x)
        along, up = line[x].astype(float), line[y].astype(float)
        if not up.notna().any():
            continue
        look = looks.look(name)
        drawn = {"color": look.colour, "marker": look.marker}
        drawn |= {"zorder": 3, "markersize": 4.6} if look.ours else {"zorder": 2, "markersize": 3.6}
        ax.plot(along, up, linewidth=thickness(look), **drawn)
        last = up.last_valid_index()
        ends.append((along[last], up[last], name))
    return ends


def log_values(ax) -> None:
    """A logarithmic axis upwards with few, plain ticks."""
    ax.set_yscale("log")
    bottom, top = ax.get_ylim()
    if top < 30 * bottom:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")


def label(ax, words: str, at: tuple, by: tuple[float, float] = (5, 0), **looks) -> None:
    """Words that stand ``by`` so many points off a point."""
    ax.annotate(words, at, by, textcoords="offset points", **looks)


def inside(ax, words: str, at: tuple, colour: str) -> None:
    """Words with their middle at a point."""
    ax.annotate(words, at, ha="center", va="center", color=colour)


def reference(ax, value: float, words: str, *, vertical: bool = False) -> None:
    """A dashed line at a value, with words at its lower or right end."""
    if vertical:
        ax.axvline(value, **REFERENCE_LINE, zorder=1)
        label(ax, words, (value, 0), (3, 4), xycoords=("data", "axes fraction"), color=DIM)
    else:
        ax.axhline(value, **REFERENCE_LINE, zorder=1)
        across = {"xycoords": ("axes fraction", "data"), "ha": "right"}
        label(ax, words, (1, value), (-2, 3), color=DIM, **across)


def bars(
    ax,
    labels: Sequence[str],
    solid: Sequence[float],
    *,
    text: Sequence[str],
    colours: Sequence[str],
    hollow: Sequence[float] | None = None,
    xlabel: str = "",
) -> None:
    """Bars lying one below another, the first on top, each with a text at its end.

    ``hollow`` is what an open bar adds to a solid one (NaN: nothing).
    """
    solid = np.asarray(solid, dtype=float)
    more = np.nan_to_num(np.asarray(hollow if hollow is not None else 0 * solid, dtype=float))
    at = np.arange(len(solid))
    ax.barh(at, solid, color=colours, height=0.62)
    shown = more > 0
    looks = {"edgecolor": np.array(colours)[shown], "fill": False, "linewidth": 1.2}
    ax.barh(at[shown], more[shown], left=solid[shown], height=0.62, **looks)
    for y, end, words in zip(at, solid + more, text, strict=True):
        label(ax, words, (end, y), va="center")
    lying(ax, labels, (solid + more).max(), xlabel)


def stacked(
    ax,
    parts: pd.DataFrame,
    colours: dict[str, str],
    *,
    text: Sequence[str] = (),
    least: float = 0.07,
    xlabel: str = "",
) -> None:
    """A lying bar per line of ``parts``, one piece per column, which ``colours`` names in order.

    A piece that takes at least ``least`` of the longest bar has its number in it; ``text`` stands
    at the ends of the bars.
    """
    total = parts[list(colours)].sum(axis=1).to_numpy(dtype=float)
    left = np.zeros(len(parts))
    for name, colour in colours.items():
        wide = parts[name].fillna(0).to_numpy(dtype=float)
        looks = {"color": colour, "label": name, "edgecolor": PAPER, "linewidth": 0.8}
        pieces = ax.barh(np.arange(len(parts)), wide, left=left, height=0.66, **looks)
        numbers = [digits(size) if size >= least * total.max() else "" for size in wide]
        ax.bar_label(pieces, numbers, label_type="center", color=PAPER)
        left += wide
    if len(text):
        ax.bar_label(pieces, text, padding=5)
    lying(ax, parts.index, total.max(), xlabel, room=0.16 if len(text) else 0.02)


def stacks(
    parts: pd.DataFrame,
    colours: dict[str, str],
    height: float,
    *,
    columns: int = 2,
    more: Callable = lambda ax: None,
    **looks,
) -> Chart:
    """``stacked`` as a chart, its colours named above in so many ``columns``; ``more(ax)`` draws
    what else is to be seen."""

    def draw(figure):
        ax = figure.subplots()
        stacked(ax, parts, colours, **looks)
        more(ax)
        figure.legend(loc="outside upper left", ncols=columns, frameon=False)

    return Chart(draw, height=height)


def heat(ax, ratios: pd.DataFrame) -> None:
    """Draw a map of ratios in percent, below 100 in our favour; lines and columns are named by the
    frame's own words.

    The colour says who is ahead and in which of HEAT_STEPS.
    """
    cells = ratios.to_numpy(dtype=float)
    step = np.searchsorted(HEAT_STEPS, np.maximum(cells, 1 / cells)) * np.sign(cells - 1)
    looks = {"cmap": ListedColormap(HEAT), "edgecolors": PAPER, "linewidth": 1.5}
    shades = ax.pcolormesh(step, vmin=-3.5, vmax=3.5, **looks)
    shades.set_rasterized(False)
    for (i, j), ratio in np.ndenumerate(cells):
        words = "–" if np.isnan(ratio) else f"{100 * ratio:.0f}"
        colour = DIM if np.isnan(ratio) else INK
        inside(ax, words, (j + 0.5, i + 0.5), colour)
    ax.set_xticks(np.arange(ratios.shape[1]) + 0.5, [str(c) for c in ratios.columns])
    ax.set_yticks(np.arange(ratios.shape[0]) + 0.5, [str(r) for r in ratios.index])
    ax.tick_params(length=0)
    ax.invert_yaxis()
    ax.grid(False)


def name_lanes(ax, at: Sequence[float], names: Sequence[str]) -> None:
    """Names at heights of an axes, without ticks and lines."""
    ax.set_yticks(at, names)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")


def lying(ax, labels, longest: float, xlabel: str, room: float = 0.24) -> None:
    """The axes of lying bars, the first on top; ``room`` is that beyond the longest."""
    name_lanes(ax, range(len(labels)), [str(label) for label in labels])
    ax.invert_yaxis()
    ax.set_xlim(0, longest * (1 + room))
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.set_xlabel(xlabel)

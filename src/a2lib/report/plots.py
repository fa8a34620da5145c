"""Parts of figures: lines that are named where they end, bars that carry their numbers, maps of
ratios.

Each function draws into an axes of a ``Chart``; ``lines`` returns what ``panels.name_ends`` needs.
A panel has at most eight marks. Axes are linear from zero, unless a range of ten times or more is
the message.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.ticker import LogLocator, MaxNLocator

from a2lib.report.panels import REFERENCE_LINE, thickness
from a2lib.report.style import DIM, INK, PAPER, Chart, Looks
from a2lib.report.units import digits

# Colours of ratios: a2lib faster by more than 2, by more than 1.25, by less; tied; a peer likewise.
HEAT = ("#f0ad78", "#f6cfab", "#fbe9da", "#eeeeee", "#dce9f7", "#b5d2f0", "#86b6e6")
HEAT_STEPS = (1.02, 1.25, 2.0)


def lines(ax, rows: pd.DataFrame, x: str, y: str, by: str, looks: Looks) -> list:
    """Draw a line for each value of column ``by``, with a gap where a row has no ``y``. Return the
    ends of the lines, (x, y, name), for ``name_ends``."""
    ends = []
    for name in looks.order(rows[by]):
        line = rows[rows[by] == name].sort_values(x)
        xs = line[x].astype(float)
        ys = line[y].astype(float)
        if ys.isna().all():
            continue
        look = looks.look(name)
        ax.plot(
            xs,
            ys,
            color=look.colour,
            marker=look.marker,
            markersize=4.6 if look.ours else 3.6,
            linewidth=thickness(look),
            zorder=3 if look.ours else 2,
        )
        last = ys.last_valid_index()
        ends.append((xs[last], ys[last], name))
    return ends


def log_values(ax) -> None:
    """Make the vertical axis logarithmic, with few and plain ticks."""
    ax.set_yscale("log")
    bottom, top = ax.get_ylim()
    if top < 30 * bottom:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")


def label(ax, words: str, at: tuple, by: tuple[float, float] = (5, 0), **looks) -> None:
    """Write words near a point, ``by`` so many points to the right and up."""
    ax.annotate(words, at, by, textcoords="offset points", **looks)


def inside(ax, words: str, at: tuple, colour: str) -> None:
    """Write words with their middle at a point."""
    ax.annotate(words, at, ha="center", va="center", color=colour)


def reference(ax, value: float, words: str, *, vertical: bool = False) -> None:
    """Draw a dashed line at a value, with words at its lower or right end."""
    if vertical:
        ax.axvline(value, **REFERENCE_LINE, zorder=1)
        place = ("data", "axes fraction")
        label(ax, words, (value, 0), (3, 4), xycoords=place, color=DIM)
    else:
        ax.axhline(value, **REFERENCE_LINE, zorder=1)
        place = ("axes fraction", "data")
        label(ax, words, (1, value), (-2, 3), xycoords=place, ha="right", color=DIM)


def stacked(
    ax,
    parts: pd.DataFrame,
    colours: dict[str, str],
    *,
    text: Sequence[str] = (),
    numbers: bool = True,
    least: float = 0.07,
    xlabel: str = "",
    room: float = 0.16,
) -> None:
    """Draw a horizontal bar for each line of ``parts``, the first on top, with a piece for each
    column.

    colours: the columns to show, in order, and their colours.
    text: what stands at the end of each bar.
    numbers: whether a piece shows its number, if it takes at least the share ``least`` of the
        longest bar.
    room: of the longest bar, for the text at its end.
    """
    longest = parts[list(colours)].sum(axis=1).to_numpy(dtype=float).max()
    left = np.zeros(len(parts))
    for name, colour in colours.items():
        sizes = parts[name].fillna(0).to_numpy(dtype=float)
        pieces = ax.barh(
            np.arange(len(parts)),
            sizes,
            left=left,
            height=0.66,
            color=colour,
            label=name,
            edgecolor=PAPER,
            linewidth=0.8,
        )
        if numbers:
            words = [digits(size) if size >= least * longest else "" for size in sizes]
            ax.bar_label(pieces, words, label_type="center", color=PAPER)
        left += sizes
    if len(text):
        ax.bar_label(pieces, text, padding=5)
        ax.grid(False)  # the text would cross it
    lying(ax, parts.index, longest, xlabel, room=room if len(text) else 0.02)


def stacks(
    parts: pd.DataFrame,
    colours: dict[str, str],
    height: float,
    *,
    columns: int = 2,
    more: Callable = lambda ax: None,
    **looks,
) -> Chart:
    """Return ``stacked`` as a chart, with a legend of so many ``columns`` above it if a bar has
    several pieces.

    ``more(ax)`` adds to the panel; ``looks`` are options of ``stacked``.
    """

    def draw(figure):
        ax = figure.subplots()
        stacked(ax, parts, colours, **looks)
        more(ax)
        if len(colours) > 1:
            figure.legend(loc="outside upper left", ncols=columns, frameon=False)

    return Chart(draw, height=height)


def heat(ax, ratios: pd.DataFrame) -> None:
    """Draw a map of ratios of times in percent, a2lib's over a peer's: below 100 a2lib is faster.

    The frame's index and columns name lines and columns. The colour says who is faster, and in
    which of HEAT_STEPS.
    """
    cells = ratios.to_numpy(dtype=float)
    factors = np.maximum(cells, 1 / cells)
    steps = np.searchsorted(HEAT_STEPS, factors) * np.sign(cells - 1)
    colours = ListedColormap(HEAT)
    shades = ax.pcolormesh(
        steps, vmin=-3.5, vmax=3.5, cmap=colours, edgecolors=PAPER, linewidth=1.5
    )
    shades.set_rasterized(False)
    for (i, j), ratio in np.ndenumerate(cells):
        colour = DIM if np.isnan(ratio) else INK
        inside(ax, _ratio_text(ratio), (j + 0.5, i + 0.5), colour)
    ax.set_xticks(np.arange(ratios.shape[1]) + 0.5, ratios.columns.map(str))
    ax.set_yticks(np.arange(ratios.shape[0]) + 0.5, ratios.index.map(str))
    ax.tick_params(length=0)
    ax.invert_yaxis()
    ax.grid(False)


def _ratio_text(ratio: float) -> str:
    """Return a ratio in percent, which is short enough for a map on a phone."""
    return "–" if np.isnan(ratio) else f"{100 * ratio:.0f}"


def name_lanes(ax, at: Sequence[float], names: Sequence[str]) -> None:
    """Write names at heights of an axes, without ticks and grid lines."""
    ax.set_yticks(at, names)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")


def lying(ax, labels, longest: float, xlabel: str, room: float) -> None:
    """Set the axes of horizontal bars, the first on top, with ``room`` (a share of the longest) for
    texts at their ends."""
    name_lanes(ax, range(len(labels)), list(map(str, labels)))
    ax.invert_yaxis()
    ax.set_xlim(0, longest * (1 + room))
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.set_xlabel(xlabel)

"""Memory of a step by category, in the order in which it is asked for.

    memory(rows).save("memory.png")     # rows of the bulk table ``memory``

Between two points lies one tensor more or less, not time: the CPU asks ahead of the GPU, and while
the CPU waits it asks for nothing. Nothing here imports torch.
"""

import math
from collections.abc import Sequence
from itertools import chain

from a2lib.report import panels, plots
from a2lib.report.style import DIM, INK, Chart
from a2lib.report.traces import legend

CATEGORIES = {
    "parameters": "#444444",
    "optimizer state": "#808080",
    "gradients": "#0072b2",
    "saved for backward": "#d55e00",
    "temporaries": "#f6cfab",
    "other": "#dddddd",
}
LETTER = 0.0195  # of the width of a panel that a letter takes
CORNERS = 1600  # of all areas of a figure together

Rows = Sequence[dict]


def memory(source: Rows | dict[str, Rows]) -> Chart:
    """Return a chart of bytes by category, stacked, with the phases and the peak marked.

    source: the rows, or several sources by title, each of which gets a panel; all have one scale.

    The peak is that of the source, also where lines are thinned.
    """
    named = source if isinstance(source, dict) else {"": source}
    sources = {title: list(rows) for title, rows in named.items()}
    if not all(sources.values()):
        return panels.empty()
    every_row = list(chain.from_iterable(sources.values()))
    highest = max(map(total, every_row))
    unit, scale = ("GB", 1e9) if highest >= 1e9 else ("MB", 1e6)
    totals = {name: sum(row[name] for row in every_row) for name in CATEGORIES}
    names = [name for name in CATEGORIES if totals[name]]
    points = CORNERS // (len(names) * len(sources))

    def draw(figure):
        axes = figure.subplots(len(sources), 1, squeeze=False, sharey=True)[:, 0]
        for ax, (title, rows) in zip(axes, sources.items(), strict=True):
            _areas(ax, rows, names, scale, points)
            _mark_peak(ax, rows, scale, unit)
            _mark_phases(ax, rows)
            ax.set(ylabel=unit, xlim=(0, _last(rows)), ylim=(0, highest / scale * 1.3))
            ax.set_xticks([])
            ax.set_title(title, loc="left")
        axes[-1].set_xlabel("tensors made and dropped, in order")
        legend(figure, {name: CATEGORIES[name] for name in reversed(names)}, columns=2)

    return Chart(draw, height=2.1 * len(sources) + 0.5 + 0.22 * math.ceil(len(names) / 2))


def total(row: dict) -> int:
    """Return the bytes of all categories at a point."""
    return sum(row[name] for name in CATEGORIES)


def _areas(ax, rows: list[dict], names: list[str], scale: float, points: int) -> None:
    """Draw the categories, stacked, at about so many ``points``."""
    kept = _thin([total(row) for row in rows], points, always=_phase_begins(rows))
    stacks = [[rows[i][name] / scale for i in kept] for name in names]
    colours = [CATEGORIES[name] for name in names]
    ax.stackplot(kept, stacks, colors=colours, step="post", linewidth=0)


def _mark_peak(ax, rows: list[dict], scale: float, unit: str) -> None:
    """Mark the first of the highest points, with its size on the side that has room."""
    peak = max(range(len(rows)), key=lambda i: total(rows[i]))
    height = total(rows[peak]) / scale
    ax.plot([peak], [height], marker="v", color=INK, markersize=6, clip_on=False)
    words = f"peak {height:.3g} {unit}"
    if peak > 0.6 * _last(rows):
        plots.label(ax, words, (peak, height), (-7, 3), ha="right")
    else:
        plots.label(ax, words, (peak, height), (7, 3), ha="left")


def _mark_phases(ax, rows: list[dict]) -> None:
    """Draw a line where each phase begins, and its name where the phase is wide enough."""
    begins, last = _phase_begins(rows), _last(rows)
    for begin, end in zip(begins, [*begins[1:], last], strict=True):
        name = rows[begin]["phase"].rpartition("/")[2]
        ax.axvline(begin, color=DIM, linewidth=0.6)
        if (end - begin) / last > LETTER * (len(name) + 1):
            middle = (begin + end) / 2, 0.97
            ax.annotate(name, middle, xycoords=("data", "axes fraction"), ha="center", va="top")


def _phase_begins(rows: list[dict]) -> list[int]:
    """Return the points at which a phase begins."""
    begins, before = [], None
    for i, row in enumerate(rows):
        if row["phase"] != before:
            begins.append(i)
        before = row["phase"]
    return begins


def _last(rows: list[dict]) -> int:
    """Return the last point; 1 where there is only one, since an axis needs a length."""
    return max(len(rows) - 1, 1)


def _thin(totals: list[int], points: int, always: list[int]) -> list[int]:
    """Return at most about ``points`` indices: of each bin the first and the highest, the last of
    all, and those in ``always``."""
    size = max(1, math.ceil(2 * len(totals) / points))
    kept = {len(totals) - 1, *always}
    for first in range(0, len(totals), size):
        in_bin = range(first, min(first + size, len(totals)))
        highest = max(in_bin, key=lambda i: totals[i])
        kept.update({first, highest})
    return sorted(kept)

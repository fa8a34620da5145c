"""Memory of a step by category, in the order in which it is asked for.

    memory({"": rows}).save("memory.png")     # rows of the bulk table ``memory``

Between two points lies one tensor more or less, not time: the CPU asks ahead of the GPU, and while
the CPU waits it asks for nothing. Nothing here imports torch.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from a2lib.report import plots
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


def memory(sources: dict[str, Rows]) -> Chart:
    """Return a chart of bytes by category, stacked, with the phases and the peak marked: a panel
    for each source by its title, all on one scale.

    The peak is that of the source, also where lines are thinned.
    """
    frames = {}
    for title, rows in sources.items():
        frames[title] = pd.DataFrame(list(rows))
    every = pd.concat(frames.values())[list(CATEGORIES)]
    highest = every.sum(axis=1).max()
    unit, scale = ("GB", 1e9) if highest >= 1e9 else ("MB", 1e6)
    names = list(every.columns[every.any()])
    visible = every.columns[every.max() > highest / 100]
    points = CORNERS // (len(names) * len(frames))
    colours = [CATEGORIES[name] for name in names]

    def draw(figure):
        axes = figure.subplots(len(frames), 1, squeeze=False, sharey=True)[:, 0]
        for ax, (title, frame) in zip(axes, frames.items(), strict=True):
            totals = frame[names].sum(axis=1).to_numpy() / scale
            begins = _phase_begins(frame["phase"])
            shown = _thin(totals, points, always=begins)
            areas = frame[names].to_numpy()[shown].T / scale
            ax.stackplot(shown, areas, colors=colours, step="post", linewidth=0)
            last = max(len(frame) - 1, 1)  # an axis needs a length
            _mark_peak(ax, totals, last, unit)
            _mark_phases(ax, frame["phase"], begins, last)
            ax.set(ylabel=unit, xlim=(0, last), ylim=(0, highest / scale * 1.3))
            ax.set_xticks([])
            ax.set_title(title, loc="left")
        axes[-1].set_xlabel("tensors made and dropped, in order")
        legend(figure, {name: CATEGORIES[name] for name in reversed(visible)}, columns=2)

    return Chart(draw, height=2.1 * len(frames) + 0.5 + 0.22 * math.ceil(len(visible) / 2))


def total(row: dict) -> int:
    """Return the bytes of all categories at a point."""
    return sum(row[name] for name in CATEGORIES)


def _mark_peak(ax, totals: np.ndarray, last: int, unit: str) -> None:
    """Mark the first of the highest points, with its size on the side that has room."""
    peak = int(totals.argmax())
    height = totals[peak]
    ax.plot([peak], [height], marker="v", color=INK, markersize=6, clip_on=False)
    words = f"peak {height:.3g} {unit}"
    if peak > 0.6 * last:
        plots.label(ax, words, (peak, height), (-7, 3), ha="right")
    else:
        plots.label(ax, words, (peak, height), (7, 3), ha="left")


def _mark_phases(ax, phases: pd.Series, begins: list[int], last: int) -> None:
    """Draw a line where each phase begins, and its name where the phase is wide enough."""
    for begin, end in zip(begins, [*begins[1:], last], strict=True):
        name = phases.iloc[begin].rpartition("/")[2]
        ax.axvline(begin, color=DIM, linewidth=0.6)
        if (end - begin) / last > LETTER * (len(name) + 1):
            middle = (begin + end) / 2, 0.97
            ax.annotate(name, middle, xycoords=("data", "axes fraction"), ha="center", va="top")


def _phase_begins(phases: pd.Series) -> list[int]:
    """Return the points at which a phase begins."""
    return np.flatnonzero(phases != phases.shift()).tolist()


def _thin(totals: np.ndarray, points: int, always: list[int]) -> list[int]:
    """Return at most about ``points`` indices: of each bin the first and the highest, the last of
    all, and those in ``always``."""
    size = max(1, math.ceil(2 * len(totals) / points))
    shown = {len(totals) - 1, *always}
    for first in range(0, len(totals), size):
        highest = first + int(totals[first : first + size].argmax())
        shown.update({first, highest})
    return sorted(shown)

"""Memory of a step by category, in the order in which it is asked for.

    memory(rows).save("memory.png")     # of a bulk table ``memory``

What lies between two points is one tensor more or less, not time: the CPU asks ahead of the GPU,
and while it waits it asks for nothing. Nothing here imports torch.
"""

from collections.abc import Iterable, Sequence

from a2lib.report import panels, plots
from a2lib.report.style import DIM, INK, Chart
from a2lib.report.traces import LETTER, legend

CATEGORIES = {
    "parameters": "#444444",
    "optimizer state": "#808080",
    "gradients": "#0072b2",
    "saved for backward": "#d55e00",
    "temporaries": "#f6cfab",
    "other": "#dddddd",
}
CORNERS = 1600  # of all areas of a figure together

Rows = Sequence[dict]


def memory(source: Rows | dict[str, Rows], *, shared: bool = True) -> Chart:
    """Bytes by category, stacked, with the phases above and the peak marked; a panel below another
    for each of several sources by title, on one scale if ``shared``.

    The peak is that of the source, also where lines are thinned.
    """
    named = source if isinstance(source, dict) else {"": source}
    panels_ = {title: list(rows) for title, rows in named.items()}
    if not all(panels_.values()):
        return panels.empty()
    most = max(total(row) for rows in panels_.values() for row in rows)
    unit, scale = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    names = [c for c in CATEGORIES if any(row[c] for rows in panels_.values() for row in rows)]

    def draw(figure):
        axes = figure.subplots(len(panels_), 1, squeeze=False, sharey=shared)[:, 0]
        for ax, (title, rows) in zip(axes, panels_.items(), strict=True):
            _panel(ax, rows, names, scale, unit, CORNERS // (len(names) * len(panels_)))
            ax.set_title(title, loc="left")
            high = most if shared else max(map(total, rows))
            ax.set(ylabel=unit, ylim=(0, high / scale * 1.3))
        axes[-1].set_xlabel("tensors made and dropped, in order")
        legend(figure, {c: CATEGORIES[c] for c in reversed(names)}, columns=2)

    return Chart(draw, height=2.1 * len(panels_) + 0.5 + 0.22 * -(-len(names) // 2))


def total(row: dict) -> int:
    """Bytes of all categories at a point."""
    return sum(row[c] for c in CATEGORIES)


def _panel(ax, rows: list[dict], names: list[str], scale: float, unit: str, points: int):
    totals = [total(row) for row in rows]
    peak = max(range(len(rows)), key=totals.__getitem__)
    begins = [i for i, row in enumerate(rows) if not i or row["phase"] != rows[i - 1]["phase"]]
    kept = _thin(totals, points, begins)
    stacks = [[rows[i][c] / scale for i in kept] for c in names]
    colours = [CATEGORIES[c] for c in names]
    ax.stackplot(kept, stacks, colors=colours, step="post", linewidth=0)
    high, last = totals[peak] / scale, len(rows) - 1 or 1
    ax.plot([peak], [high], marker="v", color=INK, markersize=6, clip_on=False)
    late = peak > last * 0.6
    by, side = ((-7, 3), "right") if late else ((7, 3), "left")
    plots.label(ax, f"peak {high:.3g} {unit}", (peak, high), by, ha=side)
    top = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "top"}
    for i, following in zip(begins, [*begins[1:], last], strict=True):
        name = rows[i]["phase"].rpartition("/")[2]
        ax.axvline(i, color=DIM, linewidth=0.6)
        if (following - i) / last > LETTER * (len(name) + 1):
            ax.annotate(name, ((i + following) / 2, 0.97), **top)
    ax.set(xlim=(0, last))
    ax.set_xticks([])


def _thin(totals: list[int], points: int, always: Iterable[int] = ()) -> list[int]:
    """At most about ``points`` indices: of each bin the first and the highest, the last of all, and
    those that are kept ``always``."""
    size = max(1, -(-2 * len(totals) // points))
    kept = {len(totals) - 1, *always}
    for first in range(0, len(totals), size):
        bin_ = range(first, min(first + size, len(totals)))
        kept |= {first, max(bin_, key=totals.__getitem__)}
    return sorted(kept)

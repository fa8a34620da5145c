"""Parts that figures share: axes with few ticks, names at the ends of lines, legends.

Lines are named where they end if there is room beside the panels, and in a legend otherwise.
"""

from matplotlib.lines import Line2D

from a2lib.report.style import DIM, INK, Look, Looks, chart

REFERENCE_LINE = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3))}
LINE = 1.28  # height of a line of text, in font sizes


def doubling_axis(ax) -> None:
    """Make the horizontal axis logarithmic, with at most six powers of two as ticks."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: short_power(value))
    low, high = ax.get_xlim()
    ticks = [2.0**n for n in range(40) if low <= 2.0**n <= high]
    if len(ticks) > 5:  # every second or fourth of them, the last among them
        step = 2 if len(ticks) <= 12 else 4
        ticks = ticks[(len(ticks) - 1) % step :: step]
    ax.set_xticks(ticks)
    ax.minorticks_off()


def places(wanted: list[float], line: float, low: float, high: float) -> list[float]:
    """Return heights for labels of height `line`, near the `wanted` ones and in their order.

    No two labels touch, and from bottom to top they keep the order of the wanted heights. Labels
    that would touch are placed as a block around the mean of what they want (the method of pooled
    adjacent violators). Blocks lie between `low` and `high`; without room they run over `high`.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks: list[list[float]] = []  # of each block the heights that its labels want
    for i in order:
        blocks.append([min(max(wanted[i], low + line / 2), high - line / 2)])
        while len(blocks) > 1 and _touch(blocks[-2], blocks[-1], line):
            upper = blocks.pop()
            blocks[-1] += upper
    heights = [0.0] * len(wanted)
    labels = iter(order)
    top = low  # of the block below
    for block in blocks:
        size = line * len(block)
        bottom = max(top, min(_mean(block) - size / 2, high - size))
        for k in range(len(block)):
            heights[next(labels)] = bottom + line * (k + 0.5)
        top = bottom + size
    return heights


def _touch(lower: list[float], upper: list[float], line: float) -> bool:
    """Return whether two blocks of labels, each around the mean of its heights, overlap."""
    top_of_lower = _mean(lower) + line * len(lower) / 2
    return top_of_lower > _mean(upper) - line * len(upper) / 2


def _mean(heights: list[float]) -> float:
    return sum(heights) / len(heights)


def name_ends(figure, ax, ends: list, looks: Looks) -> None:
    """Write the label of each line beside the panel, with a hairline from the line's end.

    `ends` are (x, y, name), as ``plots.lines`` returns them. Call this when the layout is final
    (see ``Chart``); the panel needs ``plots.ROOM`` at its right.
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
        look = looks.look(name)
        (x0, y0), (x1, y1) = to_figure([(x, y), (start, height)])
        bend = to_figure((max(panel.x1, x + 4 * pixels), y))[0]
        hairline = Line2D(
            [x0, bend, x1],
            [y0, y0, y1],
            color=look.colour,
            linewidth=0.7,
            marker=look.marker,
            markersize=5,
            markevery=[2],
        )
        figure.add_artist(hairline)
        figure.text(
            *to_figure((start + 6 * pixels, height)),
            look.label,
            va="center_baseline",
            fontweight="bold" if look.ours else "normal",
        )


def handles(names: list[str], looks: Looks) -> list[Line2D]:
    """Return the legend's entries for lines of these names."""
    entries = []
    for name in names:
        look = looks.look(name)
        entry = Line2D(
            [],
            [],
            color=look.colour,
            marker=look.marker,
            markersize=5,
            linewidth=thickness(look),
            label=look.label,
        )
        entries.append(entry)
    return entries


def thickness(look: Look) -> float:
    """Return a line's thickness in points: a2lib's own line is the thicker one."""
    return 2.2 if look.ours else 1.3


def legend(figure, handles: list, columns: int = 4) -> None:
    """Draw a legend above the panels, if there is anything to name."""
    if handles:
        figure.legend(
            handles=handles,
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            columnspacing=1.0,
            handlelength=1.5,
            handletextpad=0.5,
        )


@chart(height=1.2)
def empty(figure):
    """Draw the figure of no rows."""
    ax = figure.subplots()
    words = "not measured yet"
    ax.annotate(words, (0.5, 0.5), xycoords="axes fraction", ha="center", color=DIM)
    ax.set_axis_off()


def short_power(value: float) -> str:
    """Return a power of two in short: 512, 4k, 1M, 2G."""
    for unit, size in (("G", 2**30), ("M", 2**20), ("k", 2**10)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"

"""What the figures are made of: lines with markers, axes with few ticks, names, legends.

The names of lines stand where the lines end if there is room beside the panels, else in a legend.
"""

from matplotlib.lines import Line2D

from a2lib.report.style import DIM, INK, Look, Looks, chart

REFERENCE_LINE = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3))}
LINE = 1.28  # height of a line of text, in font sizes


def doubling_axis(ax) -> None:
    """Powers of two along the bottom, at most six of them."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: short_power(value))
    low, high = ax.get_xlim()
    ticks = [2.0**n for n in range(0, 40) if low <= 2.0**n <= high]
    ax.set_xticks(ticks[-1::-2][::-1] if len(ticks) > 5 else ticks)
    ax.minorticks_off()


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
        bottom = max(floor, min(total / n - line * n / 2, high - line * n))
        heights += [bottom + line * (k + 0.5) for k in range(int(n))]
        floor = bottom + line * n
    return [height for _, height in sorted(zip(order, heights, strict=True))]


def name_ends(figure, ax, ends: list, looks: Looks) -> None:
    """Write the label of each line beside the panel, with a hairline from the line's end.

    `ends` are (x, y, name). Call it when the layout is final; the panel's right side must have
    ROOM.
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
        drawn = {"color": look.colour, "linewidth": 0.7, "marker": look.marker, "markersize": 5}
        figure.add_artist(Line2D([x0, bend, x1], [y0, y0, y1], markevery=[2], **drawn))
        figure.text(
            *to_figure((start + 6 * pixels, height)),
            look.label,
            va="center_baseline",
            fontweight="bold" if look.ours else "normal",
        )


def handles(names: list[str], looks: Looks) -> list[Line2D]:
    """What a legend says of lines: look and label."""
    found = []
    for name in names:
        look = looks.look(name)
        drawn = {"color": look.colour, "marker": look.marker, "linewidth": thickness(look)}
        found.append(Line2D([], [], markersize=5, label=look.label, **drawn))
    return found


def thickness(look: Look) -> float:
    """Of a line, in points: ours is the thicker one."""
    return 2.2 if look.ours else 1.3


def legend(figure, handles: list, columns: int = 4) -> None:
    """A legend above the panels; none without handles."""
    if handles:
        close = {"columnspacing": 1.0, "handlelength": 1.5, "handletextpad": 0.5}
        place = {"loc": "outside upper left", "ncols": columns, "frameon": False}
        figure.legend(handles=handles, **place, **close)


@chart(height=1.2)
def empty(figure):
    """A figure of no rows."""
    ax = figure.subplots()
    middle = {"xycoords": "axes fraction", "ha": "center", "color": DIM}
    ax.annotate("not measured yet", (0.5, 0.5), **middle)
    ax.set_axis_off()


def short_power(value: float) -> str:
    """A power of two as an axis has room for: 512, 4k, 1M, 2G."""
    for unit, size in (("G", 2**30), ("M", 2**20), ("k", 2**10)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"

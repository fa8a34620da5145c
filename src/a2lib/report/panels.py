"""Parts that figures share: axes with few ticks, legends."""

from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from a2lib.report.style import INK, Look, Looks

REFERENCE_LINE = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 3))}


def doubling_axis(ax) -> None:
    """Make the horizontal axis logarithmic, with at most seven powers of two as ticks."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
    ax.xaxis.set_major_formatter(lambda value, _: short_power(value))
    ax.minorticks_off()


def name_ends(figure, ends: list, looks: Looks) -> None:
    """Draw a legend at the right of the panels, its lines in the order in which they end.

    `ends` are (x, y, name), as ``plots.lines`` returns them.
    """
    from_the_top = sorted(ends, key=lambda end: end[1], reverse=True)
    names = [name for _, _, name in from_the_top]
    drawn = figure.legend(
        handles=handles(names, looks),
        loc="outside right center",
        frameon=False,
        handlelength=1.2,
        handletextpad=0.4,
    )
    for name, text in zip(names, drawn.get_texts(), strict=True):
        text.set_fontweight("bold" if looks.look(name).ours else "normal")


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


def short_power(value: float) -> str:
    """Return a power of two in short: 512, 4k, 1M, 2G."""
    for unit, size in (("G", 2**30), ("M", 2**20), ("k", 2**10)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"

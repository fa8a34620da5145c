"""The look of every figure: colours, lines, names of devices, and the charts themselves."""

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Okabe and Ito's palette, darkened to a contrast of 3 on white. On a dark page a filter turns it
# (book/_static/custom.css).
COLOURS = ("#d55e00", "#0072b2", "#00825f", "#b0558a", "#444444", "#8b5a2b", "#a86f00", "#2a86bf")


@dataclass(frozen=True)
class Look:
    """Label, colour and marker of a line; a2lib's own (`ours`) is drawn thicker and on top."""

    label: str
    colour: str
    marker: str
    ours: bool = False


class Looks(dict[str, Look]):
    """The looks of the things that are compared, by name, in the order of drawing and listing."""

    def look(self, name: str) -> Look:
        """Return the look of `name`: grey, under its own name, if it is not listed."""
        return self.get(name) or Look(str(name), "#808080", ".")

    def label(self, name: str) -> str:
        """Return what a figure calls `name`."""
        return self.look(name).label

    def order(self, present) -> list[str]:
        """Return the names in `present`, each once: listed ones in this order, then the others."""
        present = set(present)
        listed = [name for name in self if name in present]
        return listed + sorted(present - set(self))


INK, PAPER, DIM, GRID = "#000000", "#ffffff", "#555555", "#dddddd"

# A figure is 342 px wide on a phone, so text of p points in w inches is 4.75 p / w px high there:
# at the usual 5.4 inches 10.5 points are 9 px (tests ask it of figures).
WIDTH = 5.4
RC = {
    "font.size": 10.5,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": DIM,
    "xtick.color": DIM,
    "ytick.color": DIM,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "svg.fonttype": "none",
    "svg.hashsalt": "a2lib",
    "font.family": ["DejaVu Sans", "sans-serif"],
}


def device_name(slug: str) -> str:
    """Return a device's name as people write it: NVIDIA H200 for nvidia-h200."""
    words = []
    for word in slug.split("-"):
        in_capitals = not word.isalpha() or word in ("nvidia", "cpu")
        words.append(word.upper() if in_capitals else word.capitalize())
    return " ".join(words)


class Chart:
    """A matplotlib figure that a page shows as a reproducible SVG; the same data give the same
    bytes (no dates, fixed ids).

    draw: fills the figure, `draw(figure)`.
    width, height: in inches.
    """

    def __init__(self, draw, *, width: float = WIDTH, height: float = 4.0):
        with rc_context(RC):
            self.figure = Figure(figsize=(width, height), layout="constrained")
            draw(self.figure)

    def save(self, file, **options) -> None:
        """Write the figure in its light colours; the format follows from the file's name."""
        with rc_context(RC):
            self.figure.savefig(file, **options)

    def _repr_svg_(self) -> str:
        return svg(self.figure)

    def __repr__(self) -> str:
        return "Chart"


def svg(figure: Figure) -> str:
    """Return a figure as a reproducible SVG; its layout is fixed by that."""
    buffer, canvas = io.StringIO(), FigureCanvasSVG(figure)
    with rc_context(RC):
        figure.dpi = 72  # an SVG's, which savefig sets too
        engine = figure.get_layout_engine()
        if engine:  # else matplotlib draws it twice
            engine.execute(figure)
            figure.set_layout_engine(None)
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def chart(**options: float) -> Callable:
    """Make a function that draws on a figure, its first argument, into one that returns the Chart.

        @chart(height=3.0)
        def bars(figure, rows):  # called as bars(rows)
            ...

    `options` are those of Chart: width, height.
    """

    def decorate(draw: Callable) -> Callable[..., Chart]:
        @functools.wraps(draw)
        def make_chart(*args, **kwargs) -> Chart:
            return Chart(lambda figure: draw(figure, *args, **kwargs), **options)

        return make_chart

    return decorate

"""How things look in every figure and table: lines, devices, charts."""

import functools
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Okabe and Ito's palette, darkened to a contrast of 3 on white. On a dark page a filter turns it
# (book/_static/custom.css). The marker repeats what the colour says.
COLOURS = ("#d55e00", "#0072b2", "#00825f", "#b0558a", "#444444", "#8b5a2b", "#a86f00", "#2a86bf")
MARKERS = ("o", "^", "v", "X", "s", "p", "D", "P")


@dataclass(frozen=True)
class Look:
    """Label, colour and marker of one line; ours is drawn thicker and on top."""

    label: str
    colour: str
    marker: str
    ours: bool = False


class Looks(dict[str, Look]):
    """The look of each of the things compared, in the order in which they are drawn and listed."""

    def look(self, name: str) -> Look:
        """The look of one; what is unknown is drawn in grey under its own name."""
        return self.get(name) or Look(str(name), "#808080", ".")

    def label(self, name: str) -> str:
        return self.look(name).label

    def order(self, present) -> list[str]:
        """The names among `present`, each once, in this order, unknown ones last."""
        present = set(present)
        return [name for name in self if name in present] + sorted(present - set(self))


def palette(names) -> Looks:
    """Looks for names that have none of their own, one colour and marker after another."""
    dealt = zip(names, itertools.cycle(zip(COLOURS, MARKERS, strict=True)), strict=False)
    return Looks({name: Look(str(name), *look) for name, look in dealt})


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
    """A device slug as people write it: nvidia-h200 -> NVIDIA H200."""

    def written(word: str) -> str:
        large = word in ("nvidia", "cpu") or any(c.isdigit() for c in word)
        return word.upper() if large else word.capitalize()

    return " ".join(map(written, slug.split("-")))


class Chart:
    """A matplotlib figure that a page shows as one reproducible SVG, right in both themes.

    `draw(figure)` fills the figure; what it returns, if anything, is called once positions are
    final (names at the ends of lines need them). The same data give the same bytes (no dates,
    fixed ids). `width` and `height` are in inches; `room` is the share of the width that is kept
    free of panels at the right.
    """

    def __init__(self, draw, *, width: float = WIDTH, height: float = 4.0, room: float = 0.0):
        with rc_context(RC):
            self.figure = Figure(figsize=(width, height), layout="constrained")
            self.figure.get_layout_engine().set(rect=(0, 0, 1 - room, 1))
            if finish := draw(self.figure):
                self.figure.get_layout_engine().execute(self.figure)
                self.figure.set_layout_engine(None)
                finish()

    def save(self, file, **options) -> None:
        """Write the figure in its light colours; the format follows from the file's name."""
        with rc_context(RC):
            self.figure.savefig(file, **options)

    def _repr_svg_(self) -> str:
        buffer, canvas = io.StringIO(), FigureCanvasSVG(self.figure)
        with rc_context(RC):
            self.figure.dpi = 72  # an SVG's, which savefig sets too
            if engine := self.figure.get_layout_engine():  # else matplotlib draws it twice
                engine.execute(self.figure)
                self.figure.set_layout_engine(None)
            canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})
        return buffer.getvalue()

    def __repr__(self) -> str:
        return "Chart"


def chart(**looks: float) -> Callable:
    """Of a function that draws on a figure, its first argument, as ``draw`` of Chart does, one of
    its other arguments that gives the Chart; ``looks`` are Chart's too."""

    def drawing(draw: Callable) -> Callable[..., Chart]:
        @functools.wraps(draw)
        def drawn(*given, **named) -> Chart:
            return Chart(lambda figure: draw(figure, *given, **named), **looks)

        return drawn

    return drawing

"""Drawings: what a person would rather see than read. Plain SVG, written by hand.

A cell that returns a Drawing becomes a numbered figure with the caption and the description that
the cell's metadata give. What a drawing's words count is counted by the loop that draws.
"""

from html import escape

WIDTH = 360  # units across; text is 12 units high, so that a phone shows it at more than 11 px
TEXT = "font-size: 12px; font-family: 'DejaVu Sans', sans-serif; fill: #000000"


class Drawing:
    """A drawing as the text of its elements: SVG, in user units from 0 to WIDTH and from 0 to
    `height`, with styles inline."""

    def __init__(self, elements: list[str], height: float):
        paper = f'<rect width="{WIDTH}" height="{height:g}" style="fill: #ffffff"/>'
        self._text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}">' + "\n".join([paper, *elements]) + "</svg>"
        )

    def _repr_svg_(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Drawing"


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    bold: bool = False,
    turned: bool = False,
) -> str:
    """Words at a point; `anchor` start, middle or end; `turned` reads upwards."""
    style = TEXT + ("; font-weight: 700" if bold else "")
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    words = escape(words, quote=False)
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" style="{style}"{turn}>{words}</text>'


def box(x: float, y: float, width: float, height: float, style: str, words: str = "") -> str:
    """A rectangle with its upper left corner at x, y, and words in its middle."""
    said = text(x + width / 2, y + height / 2 + 4, words, anchor="middle") if words else ""
    corner = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'{corner} style="{style}"/>{said}'


def stroke(path: str, colour: str = "#000000", width: float = 1.2, more: str = "") -> str:
    """A line along an SVG path; `more` is further style (dashes)."""
    return f'<path d="{path}" style="fill: none; stroke: {colour}; stroke-width: {width:g}{more}"/>'

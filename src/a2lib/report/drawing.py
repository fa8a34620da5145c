"""Drawings of ideas as plain SVG: boxes, lines and words.

A cell that returns a Drawing becomes a numbered figure with the caption and the description of the
cell's metadata. Drawings are code and not SVG files, for three reasons: most of them show what a
function of ``theory`` computes (a schedule, a ring, a bubble), and are wrong when it changes; the
numbers in their words are counted by the loop that draws them; and letters, colours and widths are
the same in all of them.
"""

from html import escape

WIDTH = 360  # units across; text is 12 units high, so that a phone shows it at more than 11 px
TEXT = "font-size: 12px; font-family: 'DejaVu Sans', sans-serif; fill: #000000"


class Drawing:
    """A drawing made of SVG elements, in user units from 0 to WIDTH across and 0 to `height` down,
    on white; custom.css has the filter for the dark theme."""

    def __init__(self, elements: list[str], height: float):
        size = f'width="{WIDTH}" height="{height:g}"'
        view = f'viewBox="0 0 {WIDTH} {height:g}"'
        paper = f'<rect {size} style="fill: #ffffff"/>'
        body = "\n".join([paper, *elements])
        self._text = f'<svg xmlns="http://www.w3.org/2000/svg" {view} {size}>{body}</svg>'

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
    """Return words at a point, which is their `anchor`: start, middle or end; `turned` words read
    upwards."""
    style = TEXT + ("; font-weight: 700" if bold else "")
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    words = escape(words, quote=False)
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" style="{style}"{turn}>{words}</text>'


def box(x: float, y: float, width: float, height: float, style: str, words: str = "") -> str:
    """Return a rectangle with its upper left corner at x, y, and words in its middle."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    rectangle = f'<rect {place} style="{style}"/>'
    if not words:
        return rectangle
    return rectangle + text(x + width / 2, y + height / 2 + 4, words, anchor="middle")


def stroke(path: str, colour: str = "#000000", width: float = 1.2, more: str = "") -> str:
    """Return a line along an SVG path; `more` is further style, such as dashes."""
    return f'<path d="{path}" style="fill: none; stroke: {colour}; stroke-width: {width:g}{more}"/>'

"""Pieces of a form of the book, as HTML: fields, tables of empty cells, keys, the palette.

`book/_ext/pages/forms.js` reads the fields, says a rule under the field that breaks it, keeps the
state in the page's address, and fills the cells by `data-out` and the pictures by `data-draw`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape

from a2lib.report import svg
from a2lib.report.drawing import WIDTH


@dataclass(frozen=True)
class Field:
    """A number that a reader sets, from ``least`` to ``most``: a whole one, or any.

    The form's unit is ``scale`` of the one that the script computes in.
    """

    name: str
    label: str
    unit: str
    most: float
    whole: bool = True
    scale: float = 1
    least: float = 1

    def html(self, start: float) -> str:
        keys = "numeric" if self.whole else "decimal"
        return _labelled(
            self,
            f'<input id="a2-{self.name}" name="{self.name}" inputmode="{keys}" '
            f'value="{start:.15g}" data-whole="{int(self.whole)}" data-least="{self.least:g}" '
            f'data-most="{self.most}" data-scale="{self.scale:.15g}" '
            f'aria-describedby="a2-{self.name}-error">',
        )


@dataclass(frozen=True)
class Choice:
    """One of several values that a reader sets: each with the words shown for it."""

    name: str
    label: str
    unit: str
    values: Mapping[str, str]

    def html(self, start: str) -> str:
        return _labelled(
            self,
            f'<select id="a2-{self.name}" name="{self.name}" '
            f'aria-describedby="a2-{self.name}-error">{options(self.values, start)}</select>',
        )


def options(values: Mapping[str, str], start: str) -> str:
    return "".join(
        f'<option value="{escape(value)}"{" selected" if value == start else ""}>'
        f"{escape(words)}</option>"
        for value, words in values.items()
    )


def presets(name: str, label: str, unit: str, sets: Mapping[str, Mapping[str, int]]) -> str:
    """A choice that sets several numbers at once: by its name, field -> number."""
    values = {"": "other numbers"} | {one: one for one in sets}
    return _labelled(
        Choice(name, label, unit, values),
        f'<select id="a2-{name}" name="{name}" data-sets="{escape(json.dumps(sets))}">'
        f"{options(values, '')}</select>",
    )


def _labelled(one: Field | Choice, control: str) -> str:
    return (
        f'<div class="a2-field"><label for="a2-{one.name}">{one.label} '
        f'<span class="a2-unit">{one.unit}</span></label>{control}'
        f'<p class="a2-error" id="a2-{one.name}-error" aria-live="polite"></p></div>'
    )


def fieldset(legend: str, fields: Iterable[str]) -> str:
    return f"<fieldset><legend>{legend}</legend>{''.join(fields)}</fieldset>"


STATE = (
    '<p class="a2-state" id="a2-state" role="status" aria-live="polite"></p>'
    '<p><button type="button" class="a2-copy">Copy link to this</button> '
    '<span class="a2-copied" role="status"></span></p>'
)
# The gist of the state, in view while a phone shows the fields: the status is what is read aloud.
VERDICT = '<p class="a2-verdict" aria-hidden="true"></p>'


def picture(name: str, height: int) -> str:
    return (
        f'<svg class="a2-drawing a2-{name}" data-draw="{name}" role="img" '
        f'aria-labelledby="a2-state" viewBox="0 0 {WIDTH} {height}"></svg>'
    )


def table(name, caption, corner, lines, columns) -> str:
    """A table of empty cells that the script finds by `data-out`: name.line.column. Lines and
    columns have words each, a line's may be HTML."""
    head = "".join(f'<th scope="col">{text}</th>' for text in (corner, *columns.values()))
    body = "".join(
        f'<tr><th scope="row">{text}</th>'
        + "".join(f'<td data-out="{name}.{line}.{column}"></td>' for column in columns)
        + "</tr>"
        for line, text in lines.items()
    )
    return (
        f'<table class="table a2-answers"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def swatch(drawing: str) -> str:
    """SVG in a square of 16 units, as a key has it."""
    return f'<svg class="a2-swatch" viewBox="0 0 16 16" aria-hidden="true">{drawing}</svg>'


def palette() -> str:
    """The drawings' colours as variables of the form, by the page's theme."""
    light, dark = svg.variables()
    return f'<style>.a2-form{{{light}}}html[data-theme="dark"] .a2-form{{{dark}}}</style>'

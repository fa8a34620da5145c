"""Numbered tables as Markdown, which MyST parses: cells may hold roles."""

import re
from collections.abc import Iterable

import pandas as pd

from a2lib.report.units import digits

MISSING = "·"  # a cell nobody has measured yet


class Markdown:
    """A text that a page shows as MyST Markdown."""

    def __init__(self, text: str):
        self.text = text

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


class Table(Markdown):
    """A frame of texts, shown as a numbered table; {numref} refers to it by `name`.

    frame: its columns become the head of the table.
    left: how many columns, from the first, are left-aligned; the others are right-aligned.
    keys: how many columns, from the first, name a line. A screen reader reads them as its name, and
        one or two of them stay in view while the table scrolls.
    """

    def __init__(self, frame: pd.DataFrame, caption: str, name: str, left: int = 1, keys: int = 1):
        self.frame, self.caption = frame, caption
        head = f":::{{table}} {caption}\n:name: {name}\n:class: dataframe keys-{keys}\n\n"
        super().__init__(f"{head}{pipe(frame, left)}\n:::\n")


def pipe(frame: pd.DataFrame, left: int = 1) -> str:
    """Return a frame as a Markdown pipe table; an empty frame has a line that says so."""
    if not len(frame):
        frame = pd.DataFrame([["nothing measured yet"]], columns=[" "])
    alignments = [":--" if i < left else "--:" for i in range(frame.shape[1])]
    frame = frame.astype(object).fillna(MISSING)
    lines = [_line(frame.columns), "|" + "|".join(alignments) + "|"]
    for row in frame.itertuples(index=False):
        lines.append(_line(map(_cell, row)))
    return "\n".join(lines)


def cells(values: Iterable[float]) -> list[str | None]:
    """Return the cells of a column of numbers: three figures each, None where there is no number,
    which a table shows as MISSING."""
    return [None if pd.isna(value) else digits(value, 3) for value in values]


def folded(table: Table, longest: int) -> str:
    """Return the table's text, in a fold under its caption's first clause if it has more than
    `longest` lines."""
    if len(table.frame) <= longest:
        return table.text
    title = re.split(r"[.:;] ", table.caption)[0]
    return f"::::{{dropdown}} {title}\n{table.text}::::\n"


def _line(cells) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _cell(value) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")

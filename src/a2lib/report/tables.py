"""Measured rows as numbered tables: Markdown that MyST parses, so cells may hold roles."""

import pandas as pd

MISSING = "·"  # a cell nobody has measured yet


class Markdown:
    """Text that a page shows as MyST Markdown."""

    def __init__(self, text: str):
        self.text = text

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


class Table(Markdown):
    """A frame of display texts with a caption and a label for {numref}.

    The frame's columns become the head; the first `left` columns are left-aligned text, the rest
    right-aligned numbers. The first `keys` columns name a line: a screen reader reads them as its
    name, and one or two of them stay in view while the table scrolls.
    """

    def __init__(self, frame: pd.DataFrame, caption: str, name: str, left: int = 1, keys: int = 1):
        self.frame, self.caption = frame, caption
        head = f":::{{table}} {caption}\n:name: {name}\n:class: dataframe keys-{keys}\n\n"
        super().__init__(f"{head}{pipe(frame, left)}\n:::\n")


def pipe(frame: pd.DataFrame, left: int = 1) -> str:
    """A frame as a Markdown pipe table; an empty one has a row that says so."""
    if not len(frame):
        frame = pd.DataFrame([["nothing measured yet"]], columns=[" "])
    head = "| " + " | ".join(map(str, frame.columns)) + " |"
    rule = "|" + "|".join(":--" if i < left else "--:" for i in range(frame.shape[1])) + "|"
    cells = frame.astype(object).fillna(MISSING)
    body = ["| " + " | ".join(map(_cell, row)) + " |" for row in cells.itertuples(index=False)]
    return "\n".join([head, rule, *body])


def folded(table: Table, longest: int) -> str:
    """The table's text, folded away under its caption where it has more lines than `longest`."""
    if len(table.frame) <= longest:
        return table.text
    return f"::::{{dropdown}} {table.caption}\n{table.text}::::\n"


def _cell(value) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")

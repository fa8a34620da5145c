"""Measured rows as numbered tables: Markdown that MyST parses, so cells may hold roles."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from a2lib.report import style
from a2lib.report.metrics import level
from a2lib.report.view import View

MISSING = "·"  # a cell nobody has measured yet


class Markdown:
    """Text that a page shows as MyST Markdown."""

    def __init__(self, text: str):
        self.text = text

    def _repr_markdown_(self) -> str:
        return self.text

    def _ipython_display_(self) -> None:
        """An empty text shows nothing, where its representations would be an empty box."""
        if self.text:
            raise NotImplementedError  # IPython then takes the others

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

    def html(self) -> str:
        """The same table as plain HTML, class `dataframe`."""
        return self.frame.to_html(index=False, border=0, escape=False)


def pipe(frame: pd.DataFrame, left: int = 1) -> str:
    """A frame as a Markdown pipe table; an empty one has a row that says so."""
    if not len(frame):
        frame = pd.DataFrame([["nothing measured yet"]], columns=[" "])
    head = "| " + " | ".join(map(str, frame.columns)) + " |"
    rule = "|" + "|".join(":--" if i < left else "--:" for i in range(frame.shape[1])) + "|"
    body = ["| " + " | ".join(map(_cell, row)) + " |" for row in frame.itertuples(index=False)]
    return "\n".join([head, rule, *body])


def shown(row) -> str:
    """A row's time in ms to three figures, or why it has none: oom, n/a, error."""
    return style.digits(row.ms) if row.status == "ok" else style.STATUS.get(row.status, row.status)


def peak(row) -> str:
    """A row's peak of memory, or why it has none."""
    if row.status == "ok" and not pd.isna(row.peak_bytes):
        return style.size(float(row.peak_bytes))
    return style.STATUS.get(row.status, MISSING)


def compared(rows: pd.DataFrame, view: View, cell: Callable, caption: str, name: str,
             index: tuple[str, ...] = (), bold: bool = False) -> Table:  # fmt: skip
    """A line per value of the `index` columns (the view's `along` alone by default), a column per
    thing compared; `cell(row)` is what is said of a row.

    With `bold` the fastest of a line is bold, and so is what is level with it.
    """
    index = index or (view.along,)
    names = view.looks.order(rows[view.by])
    ordered = {key: pd.Categorical(rows[key], view.shown(key, rows), ordered=True)
               for key in index}  # fmt: skip
    lines = []
    for values, group in rows.assign(**ordered).groupby(list(index), observed=True):
        found = dict(zip(group[view.by], group.itertuples(), strict=True))
        cells = {one: cell(row) for one, row in found.items()}
        timed = {one: row for one, row in found.items() if bold and not pd.isna(row.ms)}
        best = min(timed.values(), key=lambda row: row.ms, default=None)
        for one, row in timed.items() if len(timed) > 1 else ():
            if level(row, best):
                cells[one] = f"**{cells[one]}**"
        start = [view.columns[key].text(value) for key, value in zip(index, values, strict=True)]
        lines.append([*start, *(cells.get(n, MISSING) for n in names)])
    columns = [*(view.columns[key].head for key in index), *map(view.looks.short, names)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0, keys=len(index))


def latency(rows: pd.DataFrame, view: View, caption: str, name: str,
            index: tuple[str, ...] = ()) -> Table:  # fmt: skip
    """Times in ms: a line per value of the `index` columns, a column per thing compared.

    The fastest of a line is bold, and so is what is level with it.
    """
    return compared(rows, view, shown, caption, name, index, bold=True)


def coverage(rows: pd.DataFrame, view: View, split: str, expected: int, caption: str,
             name: str) -> Table:  # fmt: skip
    """Per thing compared and value of the column `split`: rows with a time, and those without by
    reason.

    `expected` is how many rows a complete sweep has for each; the reasons are the notes recorded.
    """
    lines = []
    for value in view.shown(split, rows):
        for one in view.looks.order(rows.loc[rows[split] == value, view.by]):
            group = rows[(rows[split] == value) & (rows[view.by] == one)]
            counts = group["status"].value_counts()
            notes = [note for note in group.loc[group["status"] != "ok", "note"].unique() if note]
            lines.append([
                view.looks.of(one).label, view.columns[split].text(value),
                *(int(counts.get(status, 0)) for status in ("ok", *style.STATUS)),
                max(0, expected - len(group)), _clip("; ".join(notes)),
            ])  # fmt: skip
    columns = [view.columns[view.by].head, view.columns[split].head, "timed",
               *style.STATUS.values(), "missing", "reason"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def folded(table: Table, title: str = "", longest: int = 16) -> str:
    """The table's text, folded away where it has more lines than `longest`, under a title or its
    caption."""
    if len(table.frame) <= longest:
        return table.text
    return f"::::{{dropdown}} {title or table.caption}\n{table.text}::::\n"


def _clip(text: str, limit: int = 110) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _cell(value) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")

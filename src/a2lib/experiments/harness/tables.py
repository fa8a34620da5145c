"""Tables of rows in a notebook, as HTML and as text; not for the book."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from a2lib.experiments.harness.output import display

Row = Mapping[str, object]
NOTHING = ("", "-")
# Of its mean: a deviation beyond it is that of one slow call among a few, and says nothing.
LARGEST_SPREAD = 0.5
_NUMERIC = re.compile(r"[-+±.\d]")


class Table(str):
    """A table as text, which also has its ``html``. Without lines it is empty."""

    html: str = ""


def table(body: Sequence[Sequence[str]], header: Sequence[str], says: str) -> Table:
    """Lines of cells, all text, under a header, and above it the sentence ``says``, what they are.
    A column that has nothing in any line is left out."""
    from tabulate import tabulate

    if not body:
        return Table()
    kept = [i for i in range(len(header)) if any(line[i] not in NOTHING for line in body)]
    header, body = [header[i] for i in kept], [[line[i] for i in kept] for line in body]
    made = Table(f"{says}\n{tabulate(body, header, disable_numparse=True)}")
    rows = ["".join(f"<th>{escape(head)}</th>" for head in header)]
    rows += ["".join(map(_cell, line)) for line in body]
    caption = '<caption style="caption-side: top; text-align: left">'
    made.html = "\n".join(
        [
            f'<table class="dataframe">{caption}{escape(says)}</caption>',
            f"<thead><tr>{rows[0]}</tr></thead><tbody>",
            *(f"<tr>{row}</tr>" for row in rows[1:]),
            "</tbody></table>",
        ]
    )
    return made


def _cell(text: str) -> str:
    side = "right" if _NUMERIC.match(text) else "left"
    return f'<td style="text-align: {side}">{escape(text)}</td>'


def show_tables(*parts: str) -> None:
    """Show tables and texts; a table as HTML in a notebook, and nothing for what is empty."""
    for part in filter(None, parts):
        bundle = {"text/html": getattr(part, "html", ""), "text/plain": str(part)}
        if not (isinstance(part, Table) and display(bundle)):
            print(part)


def notes(head: str, rows: Sequence[Row], who: str) -> str:
    """Why ``rows`` lack something, each reason once, by the column ``who``; "" for none."""
    found: dict[tuple, int] = {}
    for row in rows:
        reason = (row[who], row["status"], row["note"])
        found[reason] = found.get(reason, 0) + 1
    lines = [
        f"  {name}: {status}, {n} row{'s' if n > 1 else ''}{': ' if note else ''}{note}"
        for (name, status, note), n in found.items()
    ]
    return "\n".join([head, *lines]) if lines else ""


def number(value: float) -> str:
    """Four digits, and never fewer than its whole part has."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


MEANS = "mean and standard deviation, or the median where a slow call outweighs the others"


def mean(row: Mapping[str, str]) -> str:
    """The mean of a row's times (ms) and their deviation; the median where the deviation is most
    of the mean; its status where it has none."""
    if row["status"] != "ok":
        return row["status"]
    middle, spread = float(row["ms_mean"]), float(row["ms_std"] or 0)
    if spread > LARGEST_SPREAD * middle:
        return f"{number(float(row['ms']))} (median)"
    return f"{number(middle)} ± {spread:.2g}" if spread else number(middle)

"""Text tables of rows in a notebook; not for the book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = Mapping[str, object]
EMPTY = "Nothing measured yet."


def table(body: Sequence[Sequence[str]], header: Sequence[str], *, right: bool = False) -> str:
    """Lines of cells, all text, under a header; ``right`` aligns them there."""
    from tabulate import tabulate

    if not body:
        return EMPTY
    options = {"stralign": "right"} if right else {}
    return tabulate(body, header, disable_numparse=True, **options)


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

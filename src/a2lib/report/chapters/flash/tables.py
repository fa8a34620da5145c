"""The chapter's tables of the sweep."""

from __future__ import annotations

import pandas as pd

from a2lib.report import tables
from a2lib.report.chapters.flash.view import EVERY_DTYPE, PASSES, VIEW
from a2lib.report.tables import Markdown, Table, folded


def latency(rows: pd.DataFrame, caption: str, name: str,
            index: tuple[str, ...] = ("seq_len",)) -> Table:  # fmt: skip
    """Times in ms, a line per value of the `index` columns, a column per implementation."""
    return tables.latency(rows, VIEW, caption, name, index)


def memory(rows: pd.DataFrame, caption: str, name: str) -> Table:
    """Peak memory per sequence length and implementation, of one dtype, head size and pass."""
    return tables.compared(rows, VIEW, tables.peak, caption, name)


def coverage(rows: pd.DataFrame, expected: int, caption: str, name: str) -> Table:
    """Per implementation and dtype: rows with a time, and those without by reason.

    `expected` is how many rows a complete sweep has for each.
    """
    return tables.coverage(rows, VIEW, "dtype", expected, caption, name)


def sweep(rows: pd.DataFrame, label: str) -> Markdown:
    """Every latency of a sweep: one folded table per dtype and pass, lines by head size, length."""
    parts = []
    for dtype in EVERY_DTYPE:
        for pass_, title in PASSES.items():
            part = rows[(rows["dtype"] == dtype) & (rows["pass"] == pass_)]
            if len(part):
                name = f"tab-{label}-{dtype}-{pass_.replace('_', '-')}"
                table = latency(part, f"{dtype}, {title}: latency (ms)", name,
                                ("head_dim", "seq_len"))  # fmt: skip
                parts.append(folded(table, f"{dtype}, {title}"))
    return Markdown("\n\n".join(parts) or "Nothing measured yet.")

"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import local, style
from a2lib.report.chapters.memory.rows import COMMAND, Memory, mb
from a2lib.report.tables import MISSING, Markdown, Table


def show(m: Memory) -> Markdown:
    """Every step of every other device measured here."""
    return local.show(m.runs, COMMAND, (m.local, _tables))


def _tables(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    lines = []
    for row in rows[rows["phase"] == "step"].itertuples():
        cells = [MISSING if pd.isna(x) else mb(int(x))
                 for x in (row.tensor_bytes, row.allocated_bytes, row.reserved_bytes)]  # fmt: skip
        if row.status != "ok":
            cells[0] = style.STATUS.get(row.status, row.status)
        how = ", ".join([row.mode, row.precision, row.attention])
        lines.append([row.model, style.tokens(row.context), how, int(row.step_number), *cells])
    columns = ["model", "tokens", "how", "step", "tensors", "blocks", "reserved"]
    return [Table(pd.DataFrame(lines, columns=columns), f"{device}: peaks (MB)",
                  f"tab-memory-local-{number}", left=3, keys=4)]  # fmt: skip

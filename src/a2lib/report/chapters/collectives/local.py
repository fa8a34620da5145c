"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import local, style
from a2lib.report.chapters.collectives.rows import (
    COMMAND,
    NAMES,
    Collectives,
    digits,
    megabytes,
)
from a2lib.report.tables import Markdown, Table


def show(c: Collectives) -> Markdown:
    """Every collective of every other device measured here."""
    return local.show(c.runs, COMMAND, (c.local, _tables), tiny=False)


def _tables(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    order = ["backend", "world_size", "operation", "dtype", "size"]
    lines = []
    for row in rows.sort_values(order).itertuples():
        ok = row.status == "ok"
        cells = [digits(row.ms), digits(row.ms_queued), digits(row.algorithm), digits(row.bus)]
        why = [style.STATUS.get(row.status, row.status), *["·"] * 3]
        lines.append([row.operation, NAMES.get(row.backend, row.backend), int(row.world_size),
                      row.dtype, megabytes(row.size), *(cells if ok else why)])  # fmt: skip
    columns = [
        "",
        "backend",
        "ranks",
        "dtype",
        "MB",
        "ms",
        "queued",
        "algorithm, GB/s",
        "bus, GB/s",
    ]
    return [Table(pd.DataFrame(lines, columns=columns), f"{device}: collectives",
                  f"tab-collectives-local-{number}", left=2, keys=2)]  # fmt: skip

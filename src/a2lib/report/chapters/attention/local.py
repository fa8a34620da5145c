"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import local, style
from a2lib.report.chapters.attention.rows import COMMAND, MASKS, Plain, gb
from a2lib.report.chapters.measured import mean, time
from a2lib.report.tables import Markdown, Table


def show(p: Plain) -> Markdown:
    """Every pass of every other device measured here."""
    return local.show(p.runs, COMMAND, (p.local, _tables))


def _tables(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    lines = [
        [row.implementation, style.tokens(row.seq_len), int(row.head_dim),
         MASKS[bool(row.causal)], row.pass_, mean(row), time(row.ms_graph),
         time(row.ms_host), gb(row.held_bytes), gb(row.peak_bytes)]
        for row in rows.rename(columns={"pass": "pass_"}).itertuples()
    ]  # fmt: skip
    columns = ["", "tokens", "d", "mask", "pass", "ms", "GPU", "host", "before, GB", "adds, GB"]
    return [Table(pd.DataFrame(lines, columns=columns),
                  f"{device}: mean and standard deviation (ms), batch as asked",
                  f"tab-attention-local-{number}", left=1, keys=2)]  # fmt: skip

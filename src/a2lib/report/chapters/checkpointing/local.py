"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import local, style
from a2lib.report.chapters.checkpointing.rows import COMMAND, Checkpointing, gb
from a2lib.report.chapters.measured import time
from a2lib.report.tables import Markdown, Table, shown


def show(c: Checkpointing) -> Markdown:
    """Every strategy of every other device measured here."""
    return local.show(c.runs, COMMAND, (c.local, _tables))


def _tables(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    lines = [
        [f"{row.model}, {row.layers} blocks", style.tokens(row.context),
         f"{row.precision} {row.attention}, {row.gradients}", row.strategy, shown(row),
         time(row.ms_forward), time(row.ms_backward), gb(row.held_bytes), gb(row.peak_bytes)]
        for row in rows.itertuples()
    ]  # fmt: skip
    columns = ["model", "tokens", "how", "strategy", "step", "forward", "backward", "held, GB",
               "peak beyond, GB"]  # fmt: skip
    return [Table(pd.DataFrame(lines, columns=columns), f"{device}: median of a step (ms)",
                  f"tab-checkpointing-local-{number}", left=4, keys=2)]  # fmt: skip

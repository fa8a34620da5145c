"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import local, style
from a2lib.report.chapters.benchmark.rows import COMMAND, CONFIGURATION, Benchmark
from a2lib.report.chapters.measured import mean
from a2lib.report.metrics import row_of
from a2lib.report.tables import Markdown, Table

PHASES = ("forward", "backward", "optimizer", "wall")


def show(b: Benchmark) -> Markdown:
    """Every configuration of every other device measured here."""
    return local.show(b.runs, COMMAND, (b.local, _tables))


def _tables(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    lines = []
    for values, group in rows.groupby([*CONFIGURATION, "warmup"], sort=False):
        key = dict(zip(CONFIGURATION, values, strict=False))
        how = [key["mode"], key["precision"], key["attention"]]
        how += ["compiled"] * (key["compile"] != "none") + ["captured"] * bool(key["capture"])
        cells = [mean(row_of(group, phase=phase)) for phase in PHASES]
        lines.append([key["model"], style.tokens(key["context"]), ", ".join(how), *cells])
    columns = ["model", "tokens", "how", "forward", "backward", "optimizer", "step"]
    return [Table(pd.DataFrame(lines, columns=columns),
                  f"{device}: mean and standard deviation (ms)",
                  f"tab-benchmark-local-{number}", left=3, keys=2)]  # fmt: skip

"""The figures of the reader's machine."""

from __future__ import annotations

from functools import partial

import pandas as pd

from a2lib.report import local, style
from a2lib.report.chapters.compile.rows import COMMAND, Compile
from a2lib.report.tables import MISSING, Markdown, Table

COLUMNS = ["first, s", "cached, s", "kernels", "library calls"]
GRID = ["written", "dtype", "seq_len", "head_dim", "pass", "implementation"]
STEPS = ["model", "context", "precision", "phase", "compile"]


def show(c: Compile) -> Markdown:
    """Every row of every other device measured here: time, cost of compiling, kernels."""
    return local.show(c.runs, COMMAND,
                      (c.local_grid, partial(_tables, "attention", GRID)),
                      (c.local_models, partial(_tables, "train-steps", STEPS)))  # fmt: skip


def _tables(what: str, names: list[str], rows: pd.DataFrame, device: str,
            number: int) -> list[Table]:  # fmt: skip
    lines = [[*(getattr(r, n if n != "pass" else "pass_") for n in names), *_cells(r)]
             for r in rows.rename(columns={"pass": "pass_"}).itertuples()]  # fmt: skip
    frame = pd.DataFrame(lines, columns=[*names, "ms", *COLUMNS])
    label = f"tab-compile-local-{what}-{number}"
    return [Table(frame, f"{device}: {what}", label, left=len(names), keys=2)]


def _cells(r) -> list[str]:
    ms = style.digits(float(r.ms)) if r.status == "ok" else style.STATUS[r.status]
    firsts = [MISSING if pd.isna(v) else style.digits(float(v) / 1e3, 2)
              for v in (r.ms_cold, r.ms_warm)]  # fmt: skip
    made = [MISSING if pd.isna(v) else str(int(v)) for v in (r.kernels_called, r.library_calls)]
    return [ms, *firsts, *made]

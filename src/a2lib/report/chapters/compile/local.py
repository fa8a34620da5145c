"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import provenance, style
from a2lib.report.chapters.compile.rows import COMMAND, Compile
from a2lib.report.tables import MISSING, Markdown, Table, folded

COLUMNS = ["first, s", "cached, s", "kernels", "library calls"]


def show(c: Compile) -> Markdown:
    """Every row of every other device measured here: time, cost of compiling, kernels."""
    parts = []
    for what, rows, names in (
        ("attention", c.local_grid, ["written", "dtype", "seq_len", "head_dim", "pass",
                                     "implementation"]),
        ("train-steps", c.local_models, ["model", "context", "precision", "phase", "compile"]),
    ):  # fmt: skip
        for number, ((device, _), mine) in enumerate(rows.groupby(["device", "file"]), 1):
            name = style.device_name(device)
            tiny = ": tiny sizes that show that everything works, no results" * (device == "cpu")
            parts.append(f"**{name}, {what}**{tiny}")
            lines = [[*(getattr(r, n if n != "pass" else "pass_") for n in names), *_cells(r)]
                     for r in mine.rename(columns={"pass": "pass_"}).itertuples()]  # fmt: skip
            frame = pd.DataFrame(lines, columns=[*names, "ms", *COLUMNS])
            label = f"tab-compile-local-{what}-{number}"
            table = Table(frame, f"{name}: {what}", label, left=len(names), keys=2)
            parts.append(folded(table, f"{name}: {what}"))
            parts.append(provenance.source(mine, c.runs).text)
    if not parts:
        return Markdown(
            "When this page was built, nothing had been measured on another machine. Type\n\n"
            f"```\n{COMMAND}\nmake book\n```\n\nand this section shows the figures of your GPU."
        )
    return Markdown("\n\n".join(parts))


def _cells(r) -> list[str]:
    ms = style.digits(float(r.ms)) if r.status == "ok" else style.STATUS[r.status]
    firsts = [MISSING if pd.isna(v) else style.digits(float(v) / 1e3, 2)
              for v in (r.ms_cold, r.ms_warm)]  # fmt: skip
    made = [MISSING if pd.isna(v) else str(int(v)) for v in (r.kernels_called, r.library_calls)]
    return [ms, *firsts, *made]

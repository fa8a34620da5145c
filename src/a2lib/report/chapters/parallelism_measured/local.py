"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import local
from a2lib.report.chapters.parallelism_measured.answer import mesh_name
from a2lib.report.chapters.parallelism_measured.rows import COMMAND, Beside
from a2lib.report.style import STATUS, digits, tokens
from a2lib.report.tables import MISSING, Markdown, Table


def show(p: Beside) -> Markdown:
    """Every pass of every other device measured here."""
    return local.show(p.runs, COMMAND, (p.local, _tables), tiny=False)


def _tables(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    order = ["backend", "world_size", "scheme", "mesh", "implementation", "d_ff", "tokens", "phase"]
    lines = []
    for row in rows.sort_values(order).itertuples():
        who = "PyTorch" if row.implementation == "torch" else "ours"
        mesh = int(row.along_data), int(row.along_tensor)
        start = [mesh_name(row.scheme, mesh), who, f"{row.backend} {row.world_size}"]
        start += [f"{row.d_model} × {row.d_ff}", tokens(row.tokens), row.phase.replace("_", " ")]
        if row.status == "ok":
            cells = [digits(x) if not pd.isna(x) else MISSING for x in (
                row.ms, row.ms_without, row.ms_communication, row.clock)]  # fmt: skip
        else:
            cells = [STATUS.get(row.status, row.status), *[MISSING] * 3]
        lines.append([*start, *cells])
    columns = ["scheme", "by", "ranks", "d_model × d_ff", "tokens", "pass", "ms", "products alone",
               "messages alone", "predicted"]  # fmt: skip
    return [Table(pd.DataFrame(lines, columns=columns), f"{device}: schemes",
                  f"tab-beside-local-{number}", left=4, keys=2)]  # fmt: skip

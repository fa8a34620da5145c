"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import local, style
from a2lib.report.chapters.measured import time
from a2lib.report.chapters.profile.rows import COMMAND, PROFILERS, Profile, idle
from a2lib.report.tables import MISSING, Markdown, Table


def show(p: Profile) -> Markdown:
    """Every traced configuration of every other device measured here."""
    return local.show(p.runs, COMMAND, (p.local, _tables))


def _tables(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    lines = []
    for r in rows.itertuples():
        how = [r.mode, r.precision, r.attention, *(["compiled"] if r.compile != "none" else [])]
        what = [r.model, style.tokens(r.context), ", ".join(how), PROFILERS[r.profiler], r.phase]
        if r.status != "ok":
            lines.append([*what, style.STATUS[r.status], *[MISSING] * 3])
            continue
        lines.append([*what, time(r.ms_timer), time(r.ms), time(r.ms_busy), f"{idle(r):.0%}"])
    columns = ["model", "tokens", "how", "by", "phase", "timer, ms", "first to last kernel",
               "a kernel runs", "idle"]  # fmt: skip
    label = f"tab-profile-local-{number}"
    return [Table(pd.DataFrame(lines, columns=columns), f"{device}: phases of traced steps", label,
                  left=5, keys=2)]  # fmt: skip



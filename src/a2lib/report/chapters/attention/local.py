"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import provenance, style
from a2lib.report.chapters.attention.rows import COMMAND, MASKS, Plain, gb, mean, time
from a2lib.report.tables import Markdown, Table, folded


def show(p: Plain) -> Markdown:
    """Every pass of every other device measured here."""
    if not len(p.local):
        return Markdown(
            "When this page was built, nothing had been measured on another machine. "
            f"Type\n\n```\n{COMMAND}\nmake book\n```\n\nand this section shows the figures of "
            "your GPU."
        )
    parts = []
    for number, ((device, _), rows) in enumerate(p.local.groupby(["device", "file"]), 1):
        name = style.device_name(device)
        tiny = ": tiny sizes that show that everything works, no results" * (device == "cpu")
        parts.append(f"**{name}**{tiny}")
        lines = [
            [row.implementation, style.tokens(row.seq_len), int(row.head_dim),
             MASKS[bool(row.causal)], row.pass_, mean(row), time(row.ms_graph),
             time(row.ms_host), gb(row.held_bytes), gb(row.peak_bytes)]
            for row in rows.rename(columns={"pass": "pass_"}).itertuples()
        ]  # fmt: skip
        columns = ["", "tokens", "d", "mask", "pass", "ms", "GPU", "host", "before, GB", "adds, GB"]
        title = f"{name}: mean and standard deviation (ms), batch as asked"
        table = Table(pd.DataFrame(lines, columns=columns), title, f"tab-attention-local-{number}",
                      left=1, keys=2)  # fmt: skip
        parts.append(folded(table, title))
        parts.append(provenance.source(rows, p.runs).text)
    return Markdown("\n\n".join(parts))

"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import provenance, style
from a2lib.report.chapters.benchmark.rows import COMMAND, CONFIGURATION, Benchmark, mean
from a2lib.report.metrics import row_of
from a2lib.report.tables import Markdown, Table, folded

PHASES = ("forward", "backward", "optimizer", "wall")


def show(b: Benchmark) -> Markdown:
    """Every configuration of every other device measured here."""
    if not len(b.local):
        return Markdown(
            "When this page was built, nothing had been measured on another machine. Type\n\n"
            f"```\n{COMMAND}\nmake book\n```\n\nand this section shows the figures of your GPU."
        )
    parts = []
    for number, ((device, _), rows) in enumerate(b.local.groupby(["device", "file"]), 1):
        name = style.device_name(device)
        tiny = ": tiny sizes that show that everything works, no results" * (device == "cpu")
        parts.append(f"**{name}**{tiny}")
        lines = []
        for values, group in rows.groupby([*CONFIGURATION, "warmup"], sort=False):
            key = dict(zip(CONFIGURATION, values, strict=False))
            how = [key["mode"], key["precision"], key["attention"]]
            how += ["compiled"] * (key["compile"] != "none") + ["captured"] * bool(key["capture"])
            cells = [mean(row_of(group, phase=phase)) for phase in PHASES]
            lines.append([key["model"], style.tokens(key["context"]), ", ".join(how), *cells])
        columns = ["model", "tokens", "how", "forward", "backward", "optimizer", "step"]
        title = f"{name}: mean and standard deviation (ms)"
        table = Table(pd.DataFrame(lines, columns=columns), title, f"tab-benchmark-local-{number}",
                      left=3, keys=2)  # fmt: skip
        parts.append(folded(table, title))
        parts.append(provenance.source(rows, b.runs).text)
    return Markdown("\n\n".join(parts))

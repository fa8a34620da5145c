"""The figures of the reader's machine, beside the published ones."""

from __future__ import annotations

import pandas as pd

from a2lib.report import data, metrics, provenance, style, tables
from a2lib.report.chapters.flash.rows import COMMAND, Flash
from a2lib.report.metrics import pick
from a2lib.report.tables import Markdown


def rows(flash: Flash) -> pd.DataFrame:
    """What the chapter draws of this machine: one device, its largest head size up to 64."""
    found = data.handout(flash.local)
    for device in sorted(found["device"].unique(), key=lambda name: name == "cpu")[:1]:
        found = pick(found, device=device)
        sizes = found["head_dim"].unique()
        found = pick(found, head_dim=max([d for d in sizes if d <= 64] or sizes))
    return found.drop_duplicates(["implementation", *metrics.SHAPE], keep="last")


def show(flash: Flash) -> Markdown:
    """Times of every other device measured here: the handout's shapes, then any others."""
    if not len(flash.local):
        return Markdown(
            "When this page was built, nothing had been measured on another machine. Type\n\n"
            f"```\n{COMMAND}\nmake book\n```\n\nand this section shows the figures of your "
            "GPU. Without a GPU the same commands measure tiny sizes on the CPU."
        )
    parts = []
    for number, ((device, _), rows) in enumerate(flash.local.groupby(["device", "file"]), 1):
        name = style.device_name(device)
        tiny = ": tiny sizes that show that everything works, no results" * (device == "cpu")
        parts.append(f"**{name}**{tiny}")
        main = data.handout(rows)
        others = rows.drop(main.index)
        for kind, part, index in (("one head, causal", main, ()),
                                  ("other shapes", others, ("batch", "heads", "causal"))):
            for dtype, group in part.groupby("dtype"):
                title = f"{name}, {dtype}, {kind}: latency (ms)"
                label = f"tab-local-{number}-{dtype}-{len(index)}"
                columns = ("pass", *index, "head_dim", "seq_len")
                table = tables.latency(group, title, label, columns)
                parts.append(tables.folded(table, title))
        parts.append(provenance.source(rows, flash.runs).text)
    return Markdown("\n\n".join(parts))

"""Our figures beside others: those published for other GPUs, and those of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import data, metrics, provenance, style, tables
from a2lib.report.flash import COMMAND, DTYPES, LONGEST, Flash, find, listed
from a2lib.report.metrics import OURS, pick
from a2lib.report.tables import Markdown, Table

PUBLISHED_FLASH = "triton_forward_compiled_backward"


def published(flash: Flash, caption: str, name: str, head_dim: int = 64) -> Table:
    """Published H800 times, as they were printed, beside ours, with the speed-up on each."""
    lines = []
    for dtype in DTYPES:
        for pass_, title in style.PASSES.items():
            for length in (1024, 16384, LONGEST):
                where = {"dtype": dtype, "head_dim": head_dim, "seq_len": length,
                         "pass_": pass_}  # fmt: skip
                eager = find(flash.reference, implementation="eager", **where)
                tiled = find(flash.reference, implementation=PUBLISHED_FLASH, **where)
                here = [find(flash.handout, implementation=i, **where)
                        for i in ("eager", OURS)]  # fmt: skip
                lines.append([f"{dtype} {title}", style.tokens(length), _printed(eager),
                              _printed(tiled), _ratio(tiled.speedup_over_eager),
                              *(tables.shown(r) if r else tables.MISSING for r in here),
                              _ratio(here[0].ms / here[1].ms if all(here) else None)])
    columns = ["pass", "tokens", "H800 eager", "H800 tiled", "gain",
               f"{flash.short} eager", f"{flash.short} ours", "gain "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def published_gain(flash: Flash, pass_: str) -> Markdown:
    """How a pass of the published implementation compares with eager on its own machine."""
    rows = pick(flash.reference, device="H800", pass_=pass_, implementation=PUBLISHED_FLASH)
    text = []
    for dtype in DTYPES:
        ratio = pick(rows, dtype=dtype)["speedup_over_eager"].dropna()
        text.append(
            f"in {dtype} it is slower than eager at {(ratio < 1).sum()} of {len(ratio)} "
            f"shapes (speed-up from {ratio.min():.2f} to {ratio.max():.2f})"
        )
    return Markdown(f"As published, {style.PASSES[pass_]}, {listed(text)}.")


def local_rows(flash: Flash) -> pd.DataFrame:
    """What the chapter draws of this machine: one device, its largest head size up to 64."""
    rows = data.handout(flash.local)
    for device in sorted(rows["device"].unique(), key=lambda name: name == "cpu")[:1]:
        rows = pick(rows, device=device)
        sizes = rows["head_dim"].unique()
        rows = pick(rows, head_dim=max([d for d in sizes if d <= 64] or sizes))
    return rows.drop_duplicates(["implementation", *metrics.SHAPE], keep="last")


def local_tables(flash: Flash) -> Markdown:
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


def _printed(row) -> str:
    return f"{row.ms:.2f}" if row.status == "ok" else tables.shown(row)


def _ratio(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else f"{value:.2f}×"

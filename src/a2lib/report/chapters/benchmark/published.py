"""Figures of other writeups of the assignment beside ours."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import CONTEXTS, MODELS, TITLES, WARMUP, Benchmark
from a2lib.report.chapters.benchmark.warmup import samples
from a2lib.report.chapters.measured import spread
from a2lib.report.metrics import pick, row_of
from a2lib.report.tables import Markdown, Table

DEVICES = ("H800 PCIe", "unnamed GPU of 80 GB")
WARMED = "RTX 5090"
PHASES = ("forward", "backward")


def table(b: Benchmark, caption: str, name: str) -> Table:
    """Forward and backward as they were printed, beside ours."""
    lines = []
    for model in MODELS:
        for context in CONTEXTS:
            cells, published = [], False
            for phase in PHASES:
                for device in DEVICES:
                    row = row_of(b.reference, model=model, context=context, phase=phase,
                                 device=device, warmup=WARMUP)  # fmt: skip
                    published |= row is not None
                    cells.append(_printed(row))
                ours = b.phase(model, context, phase)
                cells.append("·" if ours is None else _printed(ours))
            if published:
                lines.append([TITLES[model], style.tokens(context), *cells])
    shown = ["H800 PCIe", "80 GB, unnamed", b.short]
    columns = ["model", "tokens", *(f"forward: {s}" if i == 0 else s for i, s in enumerate(shown)),
               *(f"backward: {s}" if i == 0 else f"{s} " for i, s in enumerate(shown))]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def warmups(b: Benchmark, caption: str, name: str) -> Table:
    """Forward by the number of warm-up steps, as printed for another GPU, beside ours."""
    rows = pick(b.reference, device=WARMED, phase="forward")
    lines = []
    for row in rows.itertuples():
        mine = pd.Series(samples(b, row.model, int(row.warmup), "forward"), dtype="float64")
        ours = spread(float(mine.mean()), float(mine.std())) if len(mine) else "·"
        lines.append([TITLES[row.model], int(row.warmup), _printed(row), ours])
    columns = ["model", "w", WARMED, b.short]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def sources(b: Benchmark) -> Markdown:
    """Where the published figures stand, and what they do not say."""
    found = b.reference.drop_duplicates(["device", "source"])
    told = "; ".join(f"{row.device}: {row.source}" for row in found.itertuples())
    return Markdown(
        f"Published: {told}. Neither says whether its products were in TF32, and the warm-up's "
        "figures come without a context length."
    )


def _printed(row) -> str:
    if row is None:
        return "·"
    if row.status != "ok":
        return style.STATUS.get(row.status, row.status)
    mean = row.ms if pd.isna(getattr(row, "ms_mean", float("nan"))) else row.ms_mean
    return spread(float(mean), float(row.ms_std))

"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import local
from a2lib.report.chapters.ddp.rows import COMMAND, Ddp
from a2lib.report.chapters.ddp.ways import frame
from a2lib.report.tables import Markdown, Table


def show(c: Ddp) -> Markdown:
    """Every way of every other device measured here."""
    return local.show(c.runs, COMMAND, (c.local, _tables), pair=True)


def _tables(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    made = []
    keys = ["model", "batch", "context", "precision", "capture", "backend", "world_size"]
    for place, (values, own) in enumerate(rows.groupby(keys, sort=True)):
        model, batch, context, precision, capture, backend, ranks = values
        way = "captured" if capture else "launched"
        made.append(Table(
            frame(own), f"{device}: {model}, {ranks} ranks with {backend}, batch {batch} each, "
            f"context {context}, {precision}, {way}", f"tab-ddp-local-{number}-{place}",
        ))  # fmt: skip
    return made

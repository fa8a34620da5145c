"""The figures of the reader's machine, beside the published ones."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from a2lib.report import local
from a2lib.report.chapters.flash.rows import COMMAND, Flash
from a2lib.report.chapters.flash.shapes import handout
from a2lib.report.chapters.flash.tables import latency
from a2lib.report.chapters.flash.view import SHAPE
from a2lib.report.metrics import pick
from a2lib.report.tables import Markdown, Table


def rows(flash: Flash) -> pd.DataFrame:
    """What the chapter draws of this machine: one device, its largest head size up to 64."""
    found = local.one(handout(flash.local), ["implementation", *SHAPE])
    sizes = found["head_dim"].unique()
    if not len(sizes):
        return found
    return pick(found, head_dim=max([d for d in sizes if d <= 64] or sizes))


def show(flash: Flash) -> Markdown:
    """Times of every other device measured here: the handout's shapes, then any others."""
    return local.show(flash.runs, COMMAND, (flash.local, _tables))


def _tables(rows: pd.DataFrame, device: str, number: int) -> Iterator[Table]:
    main = handout(rows)
    for kind, part, index in (("one head, causal", main, ()),
                              ("other shapes", rows.drop(main.index),
                               ("batch", "heads", "causal"))):  # fmt: skip
        for dtype, group in part.groupby("dtype"):
            yield latency(group, f"{device}, {dtype}, {kind}: latency (ms)",
                          f"tab-local-{number}-{dtype}-{len(index)}",
                          ("pass", *index, "head_dim", "seq_len"))  # fmt: skip

"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import local, style
from a2lib.report.chapters.fsdp.answer import frame
from a2lib.report.chapters.fsdp.memory import PARTS
from a2lib.report.chapters.fsdp.rows import COMMAND, NAMES, Fsdp
from a2lib.report.tables import MISSING, Markdown, Table

MOMENTS = ("init", "forward", "peak", "before", "after")


def show(c: Fsdp) -> Markdown:
    """Every step and every account of memory of every other device measured here."""
    return local.show(c.runs, COMMAND, (c.local, _steps), (c.local_held, _memory), pair=True)


def _steps(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    made = []
    keys = ["batch", "context", "precision", "backend", "world_size"]
    for place, (values, own) in enumerate(rows.groupby(keys, sort=True)):
        caption = f"{device}: steps, {_setting(*values)}"
        made.append(Table(frame(own), caption, f"tab-fsdp-local-{number}-{place}", left=2, keys=2))
    return made


def _memory(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    made = []
    keys = ["model", "batch", "context", "precision", "backend", "world_size"]
    for place, ((model, *values), own) in enumerate(rows.groupby(keys, sort=True)):
        order = own.assign(_place=own["moment"].map({m: i for i, m in enumerate(MOMENTS)}))
        order = order.sort_values(["wrapper", "step_number", "_place"], kind="stable")
        lines = []
        for row in order.itertuples():
            parts = [getattr(row, column) for column, *_ in PARTS.values() if column]
            found = [row.tensor_bytes, row.present_bytes]
            most = next((size for size in found if not pd.isna(size)), None)
            who, at = NAMES.get(row.wrapper, row.wrapper), f"{row.moment}, step {row.step_number}"
            lines.append([who, at, *map(_size, (*parts, most))])
        names = [name for column, _, name in PARTS.values() if column]
        table = pd.DataFrame(lines, columns=["", "moment", *names, "in all"])
        caption = f"{device}: memory of rank 0, {model}, {_setting(*values)}"
        label = f"tab-fsdp-local-memory-{number}-{place}"
        made.append(Table(table, caption, label, left=2, keys=2))
    return made


def _setting(batch: int, context: int, precision: str, backend: str, ranks: int) -> str:
    return f"{ranks} ranks with {backend}, batch {batch} each, context {context}, {precision}"


def _size(value: float | None) -> str:
    return MISSING if value is None or pd.isna(value) else style.size(float(value))

"""The landing page's results of two GPUs, out of two chapters: all weights on each of them, and
weights that are sharded."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from a2lib.report.chapters.ddp.rows import MODELS, UPDATING, Ddp, time
from a2lib.report.chapters.fsdp.rows import PEER, Fsdp
from a2lib.report.tables import MISSING, Table

TABLES = {"xl25": "tab-ddp-xl25-captured", "2.7B": "tab-ddp-27b-captured"}


def results(whole: Ddp, sharded: Fsdp, caption: str, name: str) -> Table:
    """A step of one GPU that sends nothing, ours replayed and launched, and PyTorch's launched."""
    lines = []
    for words, evidence, alone, rows in _shown(whole, sharded):
        cells = [MISSING if ms is None else f"{time(ms)} ms"
                 for ms in (alone, *(None if row is None else row.ms for row in rows))]  # fmt: skip
        if rows[0] is not None:
            cells[1] = f"**{cells[1]}**"
        # Its table is there with its row alone.
        cells.append(MISSING if rows[0] is None else f"{{numref}}`{evidence}`")
        lines.append([words, *cells])
    columns = ["train-step, bf16", "one GPU, captured", "ours, captured", "ours, launched",
               "PyTorch's, launched", "evidence"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=6)


def behind_results(whole: Ddp, sharded: Fsdp) -> pd.DataFrame:
    """The rows that the figures of results() come from."""
    return pd.DataFrame(
        [row._asdict() for *_, rows in _shown(whole, sharded) for row in rows if row is not None]
    )


def _shown(whole: Ddp, sharded: Fsdp) -> Iterator[tuple[str, str, float | None, tuple]]:
    """Of each line: what it is of, the table with its rows, the milliseconds of one GPU, and the
    rows of ours replayed, ours launched and PyTorch's launched."""
    for model, words in MODELS.items():
        ours = whole.fastest(model)
        rows = (ours, whole.best(model), whole.row("torch_ddp", 25, model=model))
        yield f"DDP, {words}", TABLES[model], _alone(whole, ours), rows
    for model, words in MODELS.items():
        ours = sharded.row(model=model, capture=True)
        rows = (ours, sharded.row(model=model), sharded.row(PEER, model))
        yield f"FSDP, {words}", "tab-fsdp-steps", _alone(whole, ours), rows


def _alone(whole: Ddp, row) -> float | None:
    """The step of one GPU that updates where the row does: beside its backward, or after it."""
    if row is None:
        return None
    if row.wrapper == UPDATING:
        found = whole.alone_updating(row)
        return None if found is None else found[0]
    return float(row.ms_without)

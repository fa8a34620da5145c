"""The figures of the reader's machine."""

from __future__ import annotations

import pandas as pd

from a2lib.report import local, style
from a2lib.report.chapters.sharded_optimizer.memory import COLOURS, WORDS, parts
from a2lib.report.chapters.sharded_optimizer.rows import COMMAND, Sharding, name
from a2lib.report.chapters.sharded_optimizer.times import HEADS, HOW, frame
from a2lib.report.tables import MISSING, Markdown, Table

TRAINING = ["model", "batch", "context", "precision", "attention", "backend", "world_size"]


def show(c: Sharding) -> Markdown:
    """Every way of every other device measured here."""
    return local.show(
        c.runs, COMMAND, (c.local_memory, _memory), (c.local_times, _times), pair=True
    )


def _times(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    made = []
    for place, (values, own) in enumerate(rows.groupby([*TRAINING, "compile", "capture"])):
        text = f"{device}: {_words(values)}, {HOW[values[-1]]}"
        made.append(Table(pd.DataFrame(frame(own), columns=HEADS), text,
                          f"tab-sharding-local-times-{number}-{place}"))  # fmt: skip
    return made


def _memory(rows: pd.DataFrame, device: str, number: int) -> list[Table]:
    """Of the ranks the one with most of the state, as text of three figures."""
    made = []
    for place, (values, own) in enumerate(rows.groupby(TRAINING)):
        lines = []
        for row in _fullest(own).itertuples():
            found = parts(row)
            lines.append([name(row), WORDS[row.moment],
                          *(_size(found.get(part)) for part in COLOURS)])  # fmt: skip
        columns = ["", "moment", *COLOURS]
        made.append(Table(
            pd.DataFrame(lines, columns=columns), f"{device}: memory of {_words(values)}",
            f"tab-sharding-local-memory-{number}-{place}", left=2, keys=2,
        ))  # fmt: skip
    return made


def _fullest(rows: pd.DataFrame) -> pd.DataFrame:
    shown = rows[(rows["status"] == "ok") & rows["moment"].isin(list(WORDS))]
    full = shown.sort_values("optimizer_bytes", ascending=False, kind="stable")
    return full.drop_duplicates(["optimizer", "side", "moment"]).sort_index()


def _size(n_bytes: float | None) -> str:
    return MISSING if n_bytes is None else style.size(n_bytes)


def _words(values: tuple) -> str:
    model, batch, context, precision, attention, backend, ranks = values[: len(TRAINING)]
    return (f"{model}, {ranks} ranks with {backend}, batch {batch} each, context {context}, "
            f"{precision}, {attention}")  # fmt: skip

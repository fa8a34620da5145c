"""'On your machine': the rows of the reader's devices, of any section.

    local.show(rows, runs, COMMAND, lambda rows, name, number: [Table(...)])

A chapter gives the rows that are not the published device's and says how it tabulates those of one
device; which devices there are, their order, what stands where there are none, and the lines that
say where the rows come from are the same in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pandas as pd

from a2lib.report import data, provenance, style
from a2lib.report.metrics import pick
from a2lib.report.tables import Markdown, Table, folded

Tabulate = Callable[[pd.DataFrame, str, int], Iterable[Table]]
CPU = "cpu"
TINY = ": tiny sizes that show that everything works, no results"


def devices(rows: pd.DataFrame) -> list[str]:
    """The devices among `rows`: the published one, other GPUs, the CPU."""
    return sorted(rows["device"].unique(), key=lambda name: (name != data.PUBLISHED, name == CPU,
                                                             name))  # fmt: skip


def of(rows: pd.DataFrame, device: str, key: Iterable[str], keep: str = "first") -> pd.DataFrame:
    """The rows of one device, each key once: that of the first root, or with `keep` "last" of the
    last, which is what was measured here."""
    return pick(rows, device=device).drop_duplicates(list(key), keep=keep)


def one(rows: pd.DataFrame, key: Iterable[str]) -> pd.DataFrame:
    """The rows of the first of `devices`, for a figure that has room for one; measured here where
    two roots have them. No rows give none."""
    return of(rows, devices(rows)[0], key, keep="last") if len(rows) else rows


def show(rows: pd.DataFrame, runs: pd.DataFrame, command: str, tabulate: Tabulate) -> Markdown:
    """Every table of every device among `rows`, long ones folded away, each with its source.

    `tabulate(rows, name, number)` makes the tables of one data file; `name` is its device in words,
    and `number` (1, 2, ...) keeps the tables' labels apart. `command` is what measures the section.
    """
    if not len(rows):
        return Markdown(
            "When this page was built, nothing had been measured on another machine. Type\n\n"
            f"```\n{command}\nmake book\n```\n\nand this section shows the figures of your "
            "GPU. Without a GPU the same commands measure tiny sizes on the CPU."
        )
    parts = []
    for number, ((device, _), mine) in enumerate(rows.groupby(["device", "file"]), 1):
        name = style.device_name(device)
        parts.append(f"**{name}**{TINY * (device == CPU)}")
        parts += map(folded, tabulate(mine, name, number))
        parts.append(provenance.source(mine, runs).text)
    return Markdown("\n\n".join(parts))

"""'On your machine': the rows of the reader's devices, of any section.

    local.show(runs, COMMAND, (rows, lambda rows, name, number: [Table(...)]))

A chapter gives the rows that are not the published device's and says how it tabulates those of one
device; which devices there are, their order, what stands where there are none, and the lines that
say where the rows come from are the same in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

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


def show(runs: pd.DataFrame, command: str, *parts: tuple[pd.DataFrame, Tabulate],
         tiny: bool = True, pair: bool = False) -> Markdown:  # fmt: skip
    """Every table of every device, long ones folded away, each section's with its source.

    A part is the rows of a section and `tabulate(rows, name, number)`, which makes the tables of
    one data file: `name` is its device in words, and `number` (1, 2, ...) keeps the tables' labels
    apart. `command` is what measures them. `tiny` says that a CPU's figures are trials, `pair` that
    sweeps want two GPUs.
    """
    found: dict[tuple[str, Path], list] = {}
    for rows, tabulate in parts:
        for (device, file), mine in rows.groupby(["device", "file"]):
            found.setdefault((device, Path(file).parents[1]), []).append((mine, tabulate))
    if not found:
        shape, _, _ = command.partition(" -p sweep")
        without = "Without a GPU the same commands measure tiny sizes on the CPU." * tiny
        if pair:
            without = (
                "Without two GPUs that sweep is refused; "
                f"`{shape}` then measures a tiny size between two processes on the CPU."
            )
        return Markdown(
            "When this page was built, nothing had been measured on another machine. Type\n\n"
            f"```\n{command}\nmake book\n```\n\nand this section shows the figures of your "
            f"{'GPUs' if pair else 'GPU'}. {without}"
        )
    text = []
    for number, (device, folder) in enumerate(sorted(found), 1):
        name = style.device_name(device)
        text.append(f"**{name}**{TINY * (tiny and device == CPU)}")
        for mine, tabulate in found[device, folder]:
            text += map(folded, tabulate(mine, name, number))
            text.append(provenance.source(mine, runs).text)
    return Markdown("\n\n".join(text))

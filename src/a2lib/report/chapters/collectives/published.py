"""Figures of other writeups of the assignment beside ours, their hardware named."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.collectives.rows import (
    MB,
    NAMES,
    VIEW,
    Collectives,
    backend,
    count,
    digits,
)
from a2lib.report.metrics import pick
from a2lib.report.tables import Markdown, Table

# Sizes are compared at the handout's: a writeup's 1000 MB stand beside our 1024.
NEAR = 1.1


def table(c: Collectives, caption: str, name: str) -> Table:
    """Time and bus bandwidth as published, and ours at the nearest size."""
    lines = []
    devices = list(dict.fromkeys(c.reference["device"]))
    for ranks in VIEW.looks.order(c.reference["ranks"]):
        sizes = sorted(set(pick(c.reference, ranks=ranks)["size"]))
        for megabyte in (1, 10, 100, 1024):
            near = [s for s in sizes if 1 / NEAR < s / (megabyte * MB) < NEAR]
            cells = []
            for device in devices:
                rows = pick(c.reference, ranks=ranks, device=device)
                rows = rows[rows["size"].isin(near)]
                cells.append(_cell(next(rows.itertuples(), None)))
            if any(cells):
                ours = c.row(ranks, megabyte * MB)
                known = ours is not None and ours.status == "ok"
                lines.append([NAMES[backend(ranks)], count(ranks), megabyte,
                              *(cell or "·" for cell in cells),
                              (_cell(ours) if known else "·")])  # fmt: skip
    columns = ["backend", "ranks", "MB", *devices, f"ours ({c.short})"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=3)


def verdict(c: Collectives) -> Markdown:
    """What the published figures say of their links, and where more ranks cost more than a ring."""
    told = []
    rows = pick(c.reference, backend="nccl")
    for device, mine in rows.groupby("device", sort=False):
        mine = mine[mine["size"] == mine["size"].max()].sort_values("world_size")
        rates = [f"{digits(row.bus)} GB/s between {row.world_size}" for row in mine.itertuples()]
        told.append(f"{device}: {', '.join(rates)}")
    text = f"At the largest size the bus bandwidths of NCCL are, {'; '.join(told)}."
    text += (
        " Over PCIe it falls where ranks are added, our guess is since they share the way through "
        "the host; over NVLink it does not. The time between six of the GPUs of 80 GB is below "
        "that between four, for which a ring has no reason, and its size had to be deduced from "
        "the bandwidth printed with it."
    )
    ours = [row for n in (2, 4, 6, 8) if (row := c.row(f"nccl {n}", 1024 * MB)) is not None
            and row.status == "ok"]  # fmt: skip
    if not ours:
        return Markdown(f"{text} {c.not_yet('ours beside them')}")
    rates = [f"{digits(row.bus)} GB/s between {row.world_size}" for row in ours]
    return Markdown(f"{text} Ours, {c.short}: {', '.join(rates)}.")


def sources(c: Collectives) -> Markdown:
    """Where the published figures stand."""
    found = c.reference.drop_duplicates(["device", "source"])
    told = "; ".join(f"{row.device}: {row.source}" for row in found.itertuples())
    return Markdown(f"Published: {told}. None has an address that could be given here.")


def _cell(row) -> str:
    """Milliseconds, and the bus bandwidth in parentheses."""
    if row is None:
        return ""
    return f"{style.digits(float(row.ms))} ({style.digits(float(row.bus))})"

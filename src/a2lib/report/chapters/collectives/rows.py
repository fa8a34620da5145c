"""The chapter's rows, loaded once, and what every part of it looks up in them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from a2lib.report import data, metrics, style
from a2lib.report.chapters.measured import Measured
from a2lib.report.panels import Measure
from a2lib.report.style import Look, Looks
from a2lib.report.tables import MISSING
from a2lib.report.view import Column, Columns, View
from a2lib.theory.latency import wire_share

MB = 2**20
HANDOUT = tuple(n * MB for n in (1, 10, 100, 1024))
SMALL, LARGE = HANDOUT[0], HANDOUT[-1]
COMMAND = "papermill notebooks/collectives.ipynb -p sweep all"
NAMES = {"nccl": "NCCL", "gloo": "gloo"}
UNITS = {"nccl": "GPUs", "gloo": "processes"}
BANDWIDTH = Measure("bus bandwidth (GB/s)", base=10)


def _looks() -> Looks:
    """Warm colours for GPUs, cold ones for the CPU, and a marker for each number of ranks."""
    found = Looks()
    colours = {
        "nccl": ("#d55e00", "#a86f00", "#b0558a", "#8b5a2b"),
        "gloo": ("#0072b2", "#00825f", "#2a86bf", "#444444"),
    }
    for backend, own in colours.items():
        for n, marker, colour in zip((2, 4, 6, 8), "o^sD", own, strict=True):
            label = f"{NAMES[backend]}, {n} {UNITS[backend]}"
            found[f"{backend} {n}"] = Look(label, colour, marker, short=f"{NAMES[backend]} {n}")
    return found


VIEW = View(
    case=("operation", "dtype", "size"),
    by="ranks",
    along="size",
    looks=_looks(),
    columns=Columns(
        size=Column("MB", text=lambda size: megabytes(size), axis="bytes of the tensor"),
        dtype=Column("dtype", order=("fp32", "bf16")),
    ),
)


class Collectives(Measured):
    """What the chapter shows: `table` of the published device, `local` of any other, and what
    others have published; each with `ranks` (backend and number), `algorithm` and `bus` in GB/s."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        self.table, self.local = map(with_bandwidths, self.read("collectives"))
        known = data.load_reference("collectives", needs=("backend", "world_size", "size", "ms"),
                                    numbers=("ms_mean",))  # fmt: skip
        self.reference = with_bandwidths(known.assign(ms=known["ms"].fillna(known["ms_mean"])))
        self.sums = metrics.pick(self.table, operation="all_reduce", status="ok")
        self.link = self.sheet("nvlink_egress")

    def row(self, ranks: str, size: int, operation: str = "all_reduce", dtype: str = "fp32"):
        """The row of one collective, timed or not; None where there is none."""
        return metrics.row_of(self.table, ranks=ranks, size=size, operation=operation, dtype=dtype)

    def ms(self, *given, **more) -> float | None:
        """Its time, None where there is none."""
        row = self.row(*given, **more)
        return None if row is None or row.status != "ok" else float(row.ms)

    def lines(self) -> list[str]:
        """The ranks that an all-reduce in fp32 is measured for, in the order of the view."""
        return VIEW.looks.order(metrics.pick(self.sums, dtype="fp32")["ranks"])


def with_bandwidths(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with their ranks as one name, and both bandwidths, NaN without a time."""
    name = rows["backend"].astype(str) + " " + rows["world_size"].astype(str)
    rate = rows["size"].astype(float) / rows["ms"].astype(float) / 1e6
    share = [wire_share(o, int(n)) if int(n) > 1 else float("nan")
             for o, n in zip(rows["operation"], rows["world_size"], strict=True)]  # fmt: skip
    return rows.assign(ranks=name, algorithm=rate, bus=rate * pd.Series(share, rows.index, float))


def count(ranks: str) -> int:
    return int(ranks.split()[1])


def backend(ranks: str) -> str:
    return ranks.split()[0]


def megabytes(size: float) -> str:
    """Bytes in units of 2**20, as few digits as there are: 1024, 0.25."""
    return f"{float(size) / MB:.4g}"


def digits(value: float | None, figures: int = 3) -> str:
    """A number, or the mark of what is not measured."""
    return MISSING if value is None or pd.isna(value) else style.digits(float(value), figures)

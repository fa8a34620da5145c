"""What the chapters that time something share: the device's figures, and cells of their tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from a2lib.report import data, metrics, style
from a2lib.report.tables import MISSING

SWITCHES = {"NCCL_NVLS_ENABLE=0": "NCCL_NVLS_ENABLE=0, without NVLink's multicast"}
UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Runs that had half of a host whose other GPU was measuring as well, and what that is called.
SHARED = ("20261122T235800Z", "20261122T235904Z", "20261123T000032Z", "20261123T000059Z",
          "20261123T000534Z", "20261123T001023Z", "20261123T001401Z", "20261123T001519Z",
          "20261123T001548Z", "20261123T001814Z", "20261123T030849Z", "20261123T032055Z",
          "20261123T032137Z", "20261123T034811Z", "20261123T035052Z")  # fmt: skip
HALF = "one GPU of a host of two, with half of its cores, while the other GPU ran another sweep"
HOST = 0.9  # where the host takes this share of the time or more, the time is the host's


class Measured:
    """What such a chapter rests on: the published ``device``, what it reaches in plain operations
    (``tflops`` by dtype, ``bandwidth``), the ``runs`` and what makers state of ``devices``."""

    def __init__(self, roots: list[Path] | None = None):
        self._roots = roots
        self.ceiling_rows, _ = self.read("ceiling")
        self.tflops = metrics.ceilings(self.ceiling_rows)
        self.bandwidth = metrics.copy_bandwidth(self.ceiling_rows)
        self.runs = data.load_runs(roots)
        self.devices = data.load_devices()
        self.device = style.device_name(data.PUBLISHED)
        self.short = self.device.split()[-1]

    def read(self, section: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The rows of a section: of the published device, and of any other."""
        every = data.load(section, self._roots)
        return every[~every["local"]], every[every["local"]]

    def sheet(self, quantity: str) -> float:
        """What the maker states of the published device, in the unit of devices.csv."""
        row = metrics.row_of(self.devices, device=data.PUBLISHED, quantity=quantity)
        return float(row.value)

    def given(self) -> float | None:
        """All bytes that the driver of the published GPU gives, by what PyTorch says where the
        memory chapter's steps ran out of them; None where none says."""
        notes = self.read("memory")[0].query("status == 'oom'")["note"]
        found = [size for note in notes if (size := said_bytes("total capacity of", note))]
        return min(found, default=None)

    def capacity(self) -> float:
        """The same, else what the maker states."""
        return self.given() or self.sheet("memory") * 1e9

    def one_commit(self, *rows) -> bool:
        """Whether all rows are of one commit, so that what they differ by is no change of code."""
        return len({self.runs.loc[row.run, "git"] for row in rows}) == 1

    def not_yet(self, what: str) -> str:
        """The sentence in place of a result that nobody has measured."""
        return f"**Not measured yet on an {self.device}**: {what}."


def shared(rows: pd.DataFrame) -> pd.Series:
    """Which rows are of a run that shared its host, so that times as called are of half of it."""
    return rows["run"].str.startswith(SHARED)


def said_bytes(words: str, note: str) -> float | None:
    """The size behind these words in PyTorch's message that memory ran out; None if not there."""
    found = re.search(rf"{words} ([\d.]+) (\w+)", note)
    return float(found[1]) * UNIT[found[2]] if found and found[2] in UNIT else None


def reason(note: str) -> str:
    """A row's note without what PyTorch says of the whole device, the same in every row."""
    return note.partition(" GPU 0 has")[0].rstrip(".")


def refused(rows: pd.DataFrame, name: Callable[[tuple], str]) -> list[str]:
    """A line for each row without a result: what it is by ``name``, and why; each once."""
    found = rows[rows["status"] != "ok"].itertuples()
    return list(dict.fromkeys(
        f"- {name(row)}: {style.STATUS.get(row.status, row.status)} ({reason(row.note)})"
        for row in found
    ))  # fmt: skip


def switched(rows: pd.DataFrame) -> str:
    """What rows of several GPUs were measured with."""
    rows = rows[rows["status"] == "ok"]  # what failed may not have come to say it
    known = sorted(set(rows["conditions"]) - {""})
    if not known:
        return ""
    who = "All" if (rows["conditions"] != "").all() else "Some"
    return f"{who} rows are with {style.listed([SWITCHES.get(x, x) for x in known])}."


def mean(row) -> str:
    """Mean and standard deviation in ms, or why there is none."""
    if row is None:
        return MISSING
    if row.status != "ok":
        return style.STATUS.get(row.status, row.status)
    return spread(float(row.ms_mean), float(row.ms_std))


def spread(middle: float, std: float) -> str:
    """``12.3 ± 0.04``; the mean alone where there is no deviation."""
    return style.digits(middle) + ("" if std != std else f" ± {style.digits(std, 2)}")


def time(ms: float | None) -> str:
    """Milliseconds, or the mark of what is not measured."""
    return MISSING if ms is None or pd.isna(ms) else style.digits(float(ms))

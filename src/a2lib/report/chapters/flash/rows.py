"""The chapter's rows, loaded once, and the words that every part of it uses."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from a2lib.measure.sections import FLASH
from a2lib.report import data, metrics, style
from a2lib.report.chapters.flash import shapes
from a2lib.report.chapters.flash.view import LOOKS
from a2lib.report.metrics import OURS, time_of

LENGTHS = tuple(2**n for n in range(7, 17))
HEAD_DIMS = (16, 32, 64, 128)
DTYPES = ("bf16", "fp32")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
COMPARED = (OURS, "eager", "compile", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex")
LONGEST = LENGTHS[-1]
UNKNOWN = "(not measured yet)"
COMMAND = "papermill notebooks/flash.ipynb -p seq_len 65536"
# The second machine: the GPU of the public leaderboard, measured at that board's shape alone.
SECOND = "nvidia-h100-80gb-hbm3"
# What the chapter asks of data/reference/flash.csv.
PUBLISHED = (*FLASH.key, "status", "ms", "speedup_over_eager", "title", "address")


def published() -> pd.DataFrame:
    """The figures of other people at these shapes, data/reference/flash.csv."""
    return data.load_reference("flash", needs=PUBLISHED, numbers=("speedup_over_eager",))


class Flash:
    """What the chapter shows: `rows` of the published device, `local` of the reader's, references.

    `second` has the tables of the second machine by section; `protocol` the rows of both.
    """

    def __init__(self, roots: list[Path] | None = None):
        self._roots = data.data_roots() if roots is None else roots
        self.second: dict[str, pd.DataFrame] = {}
        self._first: dict[str, pd.DataFrame] = {}
        self.rows, self.local = self._load("flash")
        self.handout = shapes.handout(self.rows)
        self.leaderboard = shapes.leaderboard(self.rows)
        self.paper = shapes.paper(self.rows)
        self.ceiling_rows, _ = self._load("ceiling")
        self.ceilings = metrics.ceilings(self.ceiling_rows)
        self._load("flash_protocol")
        self.protocol = self.both("flash_protocol")
        self.accuracy, _ = self._load("flash_accuracy")
        self.counters, _ = self._load("flash_counters")
        self.runs = data.load_runs(self._roots)
        self.reference = published()
        self.devices = data.load_devices()
        self.device = style.device_name(data.PUBLISHED)
        self.short = self.device.split()[-1]

    def _load(self, section: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Rows of the published device and the reader's; those of the second go to `second`."""
        every = data.load(section, self._roots)
        committed = str(data.section_file(self._roots[0], section, SECOND))
        second = every["file"] == committed
        self.second[section] = every[second]
        self._first[section] = every[~every["local"]]
        return self._first[section], every[every["local"] & ~second]

    def both(self, section: str) -> pd.DataFrame:
        """A section's rows of the published device, then those of the second machine."""
        first, second = self._first[section], self.second[section]
        filled = [rows for rows in (first, second) if len(rows)]
        return pd.concat(filled, ignore_index=True) if filled else first

    def measured(self) -> pd.DataFrame:
        """Every row that the chapter rests on, of all its sections and both machines."""
        tables = (self.rows, self.protocol, self.accuracy, self.counters, self.ceiling_rows)
        others = (rows for name, rows in self.second.items() if name != "flash_protocol")
        tables = (*tables, *others)
        return pd.concat([table[["run", "status"]] for table in tables], ignore_index=True)

    def best_public(self) -> float:
        """The best verified time of the 2025 leaderboard, ms, on an H100."""
        return float(time_of(self.reference, implementation="leaderboard_2025_best"))

    def sheet(self, quantity: str, device: str = data.PUBLISHED) -> float:
        """What the maker states of a device (data/reference/devices.csv), in that file's unit."""
        return float(self.sheet_row(quantity, device).value)

    def sheet_row(self, quantity: str, device: str = data.PUBLISHED):
        """The row behind sheet(), with its unit, source and address."""
        return metrics.row_of(self.devices, device=device, quantity=quantity)


def subject(name: str) -> str:
    """An implementation as the subject of a sentence."""
    return "ours" if name == OURS else LOOKS.of(name).label


def ms(value: float | None) -> str:
    """Milliseconds in words, or UNKNOWN."""
    return unit(value, "ms")


def unit(value: float | None, name: str) -> str:
    """A number with its unit, or UNKNOWN."""
    return UNKNOWN if value is None or value != value else f"{style.digits(value)} {name}"


def span(lengths) -> str:
    """Lengths in words: a single one, or from the least to the greatest."""
    low, high = min(lengths), max(lengths)
    if low == high:
        return f"{style.tokens(low)} tokens"
    return f"{style.tokens(low)} to {style.tokens(high)} tokens"

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
H100 = "nvidia-h100"  # the public leaderboard's GPU: its rows are shown beside the published ones
# What the chapter asks of data/reference/flash.csv.
PUBLISHED = (*FLASH.key, "status", "ms", "speedup_over_eager", "title", "address")


def published() -> pd.DataFrame:
    """The figures of other people at these shapes, data/reference/flash.csv."""
    return data.load_reference("flash", needs=PUBLISHED, numbers=("speedup_over_eager",))


class Flash:
    """What the chapter shows: `rows` of the published device, `local` of any other, references."""

    def __init__(self, roots: list[Path] | None = None):
        every = data.load("flash", roots)
        self.rows = every[~every["local"]]
        self.local = every[every["local"]]
        self.handout = shapes.handout(self.rows)
        self.leaderboard = shapes.leaderboard(self.rows)
        self.paper = shapes.paper(self.rows)
        ceiling = data.load("ceiling", roots)
        self.ceiling_rows = ceiling[~ceiling["local"]]
        self.ceilings = metrics.ceilings(self.ceiling_rows)
        protocol = data.load("flash_protocol", roots)
        h100 = protocol["device"].astype(str).str.startswith(H100)
        self.protocol = protocol[~protocol["local"] | h100]
        accuracy = data.load("flash_accuracy", roots)
        self.accuracy = accuracy[~accuracy["local"]]
        counters = data.load("flash_counters", roots)
        self.counters = counters[~counters["local"]]
        self.runs = data.load_runs(roots)
        self.reference = published()
        self.devices = data.load_devices()
        self.device = style.device_name(data.PUBLISHED)
        self.short = self.device.split()[-1]

    def measured(self) -> pd.DataFrame:
        """Every row of the published device that the chapter rests on, of all its sections."""
        tables = (self.rows, self.protocol, self.accuracy, self.counters, self.ceiling_rows)
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

"""The chapter's rows, loaded once, and the words that every part of it uses."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from a2lib.measure.sections import SECTIONS
from a2lib.report import data, local, style
from a2lib.report.chapters.measured import Measured

TABLES = ("accumulation", "autocast_dtypes", "layernorm")
COMMAND = "papermill notebooks/mixed_precision.ipynb"
MISSING = "not measured yet"
PRECISIONS = ("fp32", "tf32", "bf16")


class Mixed(Measured):
    """What the chapter shows: the `tables` of every device, the benchmark's rows, references."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        self.tables = {name: data.load(name, roots) for name in TABLES}
        self.steps, _ = self.read("benchmark")
        self.reference = data.load_reference("mixed_precision")

    def devices_of(self, table: str) -> list[str]:
        """The devices that have rows of `table`: the published one, other GPUs, the CPU."""
        return local.devices(self.tables[table])

    def of(self, table: str, device: str) -> pd.DataFrame:
        """The rows of `table` of one device, the first root's where two roots have them."""
        return local.of(self.tables[table], device, SECTIONS[table].key)

    def best(self, table: str) -> pd.DataFrame:
        """The rows of the first of `devices_of`; none if there is none."""
        found = self.devices_of(table)
        return self.of(table, found[0]) if found else self.tables[table]

    def observed(self) -> pd.DataFrame:
        """The rows of all three tables together, for what is said of their runs."""
        return pd.concat([self.tables[name][["run"]] for name in TABLES])


def named(device: str) -> str:
    """A device in words."""
    return "a CPU" if device == "cpu" else f"the {style.device_name(device)}"

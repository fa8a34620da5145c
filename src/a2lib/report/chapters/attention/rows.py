"""The chapter's rows, loaded once, and what every part of it looks up in them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from a2lib.report import data, metrics, style
from a2lib.report.chapters.measured import Measured
from a2lib.report.tables import MISSING
from a2lib.theory.eager import Eager

BATCH = 8
LENGTHS = (256, 1024, 4096, 8192, 16384)
HEAD_DIMS = (16, 32, 64, 128)
PASSES = ("forward", "backward")
MASKS = {False: "full", True: "causal"}
LONGEST, MIDDLE = LENGTHS[-1], 64
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
COMMAND = "papermill notebooks/attention.ipynb -p sweep all"


class Plain(Measured):
    """What the chapter shows: `table`, `saved` and `limits` of the published device, `local` of any
    other. `flash` are eager's rows in the sweep
    of the chapter on FlashAttention-2."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        self.table, self.local = self.read("attention")
        self.saved, self.limits = (self.read(f"attention_{name}")[0] for name in ("saved", "limit"))
        flash, _ = self.read("flash")
        self.flash = flash[flash["implementation"] == "eager"]
        self.reference = data.load_reference("attention")

    def row(self, pass_: str, seq_len: int = LONGEST, head_dim: int = MIDDLE, causal: bool = False,
            implementation: str = "eager"):  # fmt: skip
        """The row of one pass at one shape, timed or not; None where there is none."""
        return metrics.row_of(self.table, pass_=pass_, seq_len=seq_len, head_dim=head_dim,
                              causal=causal, implementation=implementation, batch=BATCH,
                              dtype="fp32")  # fmt: skip

    def capacity(self) -> int:
        """The memory of the published GPU in bytes: what the driver called free where the ends were
        tried, else what the maker states."""
        free = self.limits["room_bytes"].max() if len(self.limits) else None
        return int(self.sheet("memory") * 1e9 if pd.isna(free) else free)


def shape(seq_len: int = LONGEST, head_dim: int = MIDDLE, causal: bool = False) -> Eager:
    return Eager(BATCH, int(seq_len), int(head_dim), bool(causal))


def shape_of(row) -> Eager:
    """The closed form of a stored row, of any section with a shape."""
    batch = int(row.batch) * int(getattr(row, "heads", 1))
    return Eager(batch, int(row.seq_len), int(row.head_dim), bool(row.causal), BYTES[row.dtype])


def gb(size: float | None) -> str:
    """Bytes in units of 10^9, three figures."""
    return MISSING if size is None or pd.isna(size) else style.digits(float(size) / 1e9)

"""The chapter's rows, loaded once, and what every part of it looks up in them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from a2lib.report import data, metrics, style
from a2lib.theory.eager import Eager

BATCH = 8
LENGTHS = (256, 1024, 4096, 8192, 16384)
HEAD_DIMS = (16, 32, 64, 128)
PASSES = ("forward", "backward")
MASKS = {False: "full", True: "causal"}
LONGEST, MIDDLE = LENGTHS[-1], 64
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
COMMAND = "papermill notebooks/attention.ipynb -p sweep all"


class Plain:
    """What the chapter shows: `table`, `saved` and `limits` of the published device, `local` of any
    other, and what the device reaches in plain operations. `flash` are eager's rows in the sweep
    of the chapter on FlashAttention-2."""

    def __init__(self, roots: list[Path] | None = None):
        every = data.load("attention", roots)
        self.table, self.local = every[~every["local"]], every[every["local"]]
        saved, limits = data.load("attention_saved", roots), data.load("attention_limit", roots)
        self.saved, self.limits = saved[~saved["local"]], limits[~limits["local"]]
        flash = data.load("flash", roots)
        self.flash = flash[~flash["local"] & (flash["implementation"] == "eager")]
        ceiling = data.load("ceiling", roots)
        self.ceiling_rows = ceiling[~ceiling["local"]]
        self.tflops = metrics.ceilings(self.ceiling_rows)
        self.bandwidth = metrics.copy_bandwidth(self.ceiling_rows)
        self.runs = data.load_runs(roots)
        self.reference = data.load_reference("attention")
        self.devices = data.load_devices()
        self.device = style.device_name(data.PUBLISHED)
        self.short = self.device.split()[-1]

    def row(self, pass_: str, seq_len: int = LONGEST, head_dim: int = MIDDLE, causal: bool = False,
            implementation: str = "eager"):  # fmt: skip
        """The row of one pass at one shape, timed or not; None where there is none."""
        return metrics.row_of(self.table, pass_=pass_, seq_len=seq_len, head_dim=head_dim,
                              causal=causal, implementation=implementation, batch=BATCH,
                              dtype="fp32")  # fmt: skip

    def capacity(self) -> int:
        """The memory that the maker states of the published GPU, in bytes."""
        row = metrics.row_of(self.devices, device=data.PUBLISHED, quantity="memory")
        return int(row.value * 1e9)

    def not_yet(self, what: str) -> str:
        """The sentence in place of a result that nobody has measured."""
        return f"**Not measured yet on an {self.device}**: {what}."


def shape(seq_len: int = LONGEST, head_dim: int = MIDDLE, causal: bool = False) -> Eager:
    return Eager(BATCH, int(seq_len), int(head_dim), bool(causal))


def shape_of(row) -> Eager:
    """The closed form of a stored row, of any section with a shape."""
    batch = int(row.batch) * int(getattr(row, "heads", 1))
    return Eager(batch, int(row.seq_len), int(row.head_dim), bool(row.causal), BYTES[row.dtype])


def mean(row) -> str:
    """Mean and standard deviation in ms, or why there is none."""
    if row is None:
        return "·"
    if row.status != "ok":
        return style.STATUS.get(row.status, row.status)
    deviation = "" if pd.isna(row.ms_std) else f" ± {style.digits(float(row.ms_std), 2)}"
    return style.digits(float(row.ms_mean)) + deviation


def time(ms: float | None) -> str:
    return "·" if ms is None or pd.isna(ms) else style.digits(float(ms))


def gb(size: float | None) -> str:
    """Bytes in units of 10^9, three figures."""
    return "·" if size is None or pd.isna(size) else style.digits(float(size) / 1e9)


def listed(words: list[str]) -> str:
    """Words as a list in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]

"""The chapter's rows, loaded once, and what every part of it looks up in them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from a2lib.measure import bulk
from a2lib.report import data, metrics
from a2lib.report.chapters.collectives import Collectives, line
from a2lib.report.chapters.measured import Measured
from a2lib.theory import fsdp as theory
from a2lib.theory.latency import Line
from a2lib.theory.transformer import SIZES

COMMAND = "papermill notebooks/fsdp.ipynb -p sweep all"
WORLD_SIZE, BATCH, CONTEXT = 2, 4, 512
# What the handouts call xl. The targets are for that of 2025, as those of data parallelism.
MODELS = {"xl25": "the xl of 2025", "2.7B": "the xl of 2026 (2.7B)"}
MAIN = "xl25"
OURS, PEER = "fsdp", "fsdp2"
NAMES = {OURS: "ours", PEER: "PyTorch's FSDP2"}
NCCL = f"nccl {WORLD_SIZE}"  # these ranks in the chapter on collectives
COMPUTES = 2  # bytes of an element that is computed with
GB = 1e9


class Fsdp(Measured):
    """What the chapter shows: steps (`table`), memory (`held`) and tables of all-gathers of the
    published device, `local` and `local_held` of any other, and the `collectives` whose line
    predicts a gather's time."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        self.table, self.local = self.read("fsdp")
        self.held, self.local_held = self.read("fsdp_memory")
        self.collectives = Collectives(roots)
        self.link = self.sheet("nvlink_egress")
        # TFLOP/s that large products reach, or that the maker states.
        self.rate = self.tflops.get("bf16") or self.sheet("bf16_dense")
        root = (data.data_roots() if roots is None else roots)[0]
        self._gathers = _pictures("gathers", root)
        self._strips = _pictures("strip", root)

    def row(self, wrapper: str = OURS, model: str = MAIN, capture: bool = False):
        """The row of a step on two GPUs, None where it has no time."""
        return metrics.timed_row(_ours(self.table), wrapper=wrapper, model=model, capture=capture)

    def at(self, moment: str, step: int | None = None, wrapper: str = OURS, model: str = MAIN):
        """The row of memory at a moment, of the first step (0) or the later one; None for none."""
        found = metrics.pick(_ours(self.held), wrapper=wrapper, model=model, moment=moment)
        found = found[found["status"] == "ok"]
        found = found[found["step_number"] == 0] if step == 0 else found
        return next(found.sort_values("step_number").iloc[::-1].itertuples(), None)

    def gathers(self, model: str = MAIN, capture: bool = False) -> list[dict]:
        """The table of all-gathers of a step; no rows where there is none."""
        return _rows_of(self._gathers, model, capture)

    def strip(self, model: str = MAIN) -> list[dict]:
        """The window of a launched step's trace."""
        return _rows_of(self._strips, model, False)

    def line(self) -> Line | None:
        """What an all-reduce among others costs between two GPUs, by the rows of collectives."""
        return line.fitted(self.collectives, NCCL, "ms_queued")


def sizes(model: str) -> theory.Sizes:
    return theory.sizes(SIZES[model])


def activations(c: Fsdp, model: str, wrapper: str = OURS) -> float | None:
    """Bytes at the forward's end that are neither state nor gathered weights."""
    row = c.at("forward", None, wrapper, model)
    if row is None or pd.isna(row.present_bytes):
        return None
    return float(row.present_bytes - row.parameter_bytes - row.optimizer_bytes - row.whole_bytes)


def gb(size: float) -> str:
    """Bytes in GB, to three figures from 10 on, else two places."""
    size /= GB
    return f"{size:.1f}" if size >= 9.95 else f"{size:.2f}"


def _ours(rows: pd.DataFrame) -> pd.DataFrame:
    where = {"backend": "nccl", "world_size": WORLD_SIZE, "batch": BATCH, "context": CONTEXT}
    return metrics.pick(rows, precision="bf16", **where)


def _pictures(table: str, root: Path) -> list[bulk.Picture]:
    found = [bulk.read(table, *name, root) for name in bulk.pictures(table, root)
             if name[0] == data.PUBLISHED]  # fmt: skip
    shown = {"section": "fsdp", "world_size": WORLD_SIZE, "batch": BATCH, "context": CONTEXT}
    return [one for one in found if shown.items() <= one.about.items()]


def _rows_of(pictures: list[bulk.Picture], model: str, capture: bool) -> list[dict]:
    for one in pictures:
        if (one.about["model"], one.about["capture"]) == (model, capture):
            return one.rows
    return []

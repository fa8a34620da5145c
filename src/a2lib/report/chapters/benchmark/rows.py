"""The chapter's rows, loaded once, and what every part of it looks up in them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from a2lib.report import data
from a2lib.report.chapters.measured import HALF, Measured, shared
from a2lib.theory.transformer import SIZES

MODELS = tuple(name for name in SIZES if name != "8B")
CONTEXTS = (128, 256, 512, 1024)
PHASES = ("forward", "backward", "optimizer")
WARMUP = 5
CONTEXT = 512  # what the handout asks for unless it says otherwise
# What a way of running the step has in its key columns; a captured one is the GPU's time of a way.
PLAIN = {"precision": "fp32", "attention": "eager", "compile": "none"}
AUTOCAST = {"precision": "bf16", "attention": "eager", "compile": "none"}
OURS = {"precision": "bf16", "attention": "flash", "compile": "blocks"}
PEER = {**OURS, "attention": "sdpa_flash"}  # PyTorch's own attention in the place of ours
EAGER_OURS = {**AUTOCAST, "attention": "flash"}
TITLES = {"small": "small", "medium": "medium", "large": "large", "xl25": "xl (2025)",
          "2.7B": "2.7B", "10B": "10B"}  # fmt: skip
CONFIGURATION = ["model", "context", "batch", "mode", "precision", "attention", "compile",
                 "capture"]  # fmt: skip
LOOKED_UP = ("model", "context", "mode", "precision", "attention", "compile", "capture", "warmup",
             "phase")  # fmt: skip
COMMAND = "papermill notebooks/benchmark.ipynb -p sweep all"


class Benchmark(Measured):
    """What the chapter shows: `table`, `steps`, `firsts` and `power` of the published device,
    `local` of any other."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        table, self.local = self.read("benchmark")
        self.table = _by_name(table)
        self._rows: dict[tuple, object] = {}
        for row in self.table.itertuples():
            self._rows.setdefault(tuple(getattr(row, name) for name in LOOKED_UP), row)
        self.steps = _by_name(self.read("benchmark_steps")[0])
        self.firsts = _by_name(self.read("benchmark_first")[0])
        self.power = _by_name(self.read("benchmark_power")[0])
        self.reference = data.load_reference("benchmark")

    def measured(self) -> pd.DataFrame:
        """Every row that the page shows."""
        tables = (self.table, self.steps, self.firsts, self.power)
        return pd.concat([table[["run", "status"]] for table in tables], ignore_index=True)

    def row(self, model: str, context: int, phase: str = "wall", way: dict = PLAIN,
            mode: str = "train-step", capture: bool = False):  # fmt: skip
        """The row of one phase of a configuration, timed or not; None where there is none."""
        where = {"model": model, "context": context, "phase": phase, "mode": mode, **way}
        where |= {"capture": capture, "warmup": WARMUP}
        return self._rows.get(tuple(where[name] for name in LOOKED_UP))

    def phase(self, model: str, context: int, phase: str):
        """The plain row of a phase: of the train-step, or where that has no time of the longest
        mode that has one."""
        found = [self.row(model, context, phase, mode=mode)
                 for mode in ("train-step", "forward-backward", "forward")]  # fmt: skip
        timed = [row for row in found if row is not None and row.status == "ok"]
        return next(iter([*timed, *(row for row in found if row is not None)]), None)

    def host(self, model: str, context: int, way: dict = PLAIN) -> float | None:
        """What the host takes to issue a train-step, in ms; None where it is not known."""
        row = self.row(model, context, "step", way=way)
        return None if row is None or pd.isna(row.ms_host) else float(row.ms_host)

    def ms(self, *where, **more) -> float | None:
        """The median of row(), None where there is none."""
        row = self.row(*where, **more)
        return None if row is None or row.status != "ok" else float(row.ms)


def half(rows: pd.DataFrame, what: str) -> str:
    """That some of these rows have the host's times of a shared host; "" where none has."""
    rows = rows[rows["status"] == "ok"]
    n = int(shared(rows).sum()) if len(rows) else 0
    if not n:
        return ""
    which = "all" if n == len(rows) else f"{n:,} of {len(rows):,}"
    return f" What the host takes is, in {which} of these {what}, of {HALF}."


def _by_name(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, smallest model first."""
    order = {name: i for i, name in enumerate(MODELS)}
    place = rows["model"].map(order).fillna(len(order))
    keys = [key for key in ("context", "warmup", "step_number") if key in rows]
    return rows.assign(_place=place).sort_values(["_place", *keys], kind="stable").drop(
        columns="_place"
    )  # fmt: skip

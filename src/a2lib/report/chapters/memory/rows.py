"""The chapter's rows, loaded once, and what every part of it looks up in them or counts."""

from __future__ import annotations

import functools
from pathlib import Path

import pandas as pd

from a2lib.measure import bulk
from a2lib.measure.bulk import Picture
from a2lib.report import data, metrics, style
from a2lib.report.chapters.measured import Measured
from a2lib.report.tables import MISSING
from a2lib.theory import step_memory
from a2lib.theory.step_memory import Peak, Replay, StepMemory
from a2lib.theory.transformer import SIZES

BATCH = 4
MODEL = "2.7B"
MODELS = ("small", "medium", "large", "xl25", MODEL, "10B")
CONTEXTS = (128, 256, 512, 1024, 2048)
SHOWN = 512  # the context whose timelines are drawn
MODES = {"inference": "forward", "forward": "forward, kept", "train-step": "train-step"}
PRECISIONS = ("fp32", "bf16")
ATTENTIONS = ("eager", "flash")
COMMAND = "papermill notebooks/memory.ipynb -p sweep all"


class Memory(Measured):
    """What the chapter shows: `table`, `recordings` and `blocks` of the published device, `local`
    of any other; `bench` are its plain rows in the chapter on benchmarking."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        self.table, self.local = self.read("memory")
        self.recordings, self.blocks = (
            self.read(f"memory_{name}")[0] for name in ("recording", "block")
        )
        # Of anything else that was measured there nothing is said.
        self.table, self.recordings, self.blocks = (
            rows[(rows["batch"] == BATCH) & rows["model"].isin(MODELS)]
            for rows in (self.table, self.recordings, self.blocks)
        )
        bench, _ = self.read("benchmark")
        plain = (bench["compile"] == "none") & ~bench["capture"] & (bench["precision"] == "fp32")
        self.bench = bench[plain & (bench["attention"] == "eager") & (bench["phase"] == "step")]
        self.reference = data.load_reference("memory", needs=("printed",), numbers=("printed",))

    def row(self, step: StepMemory, number: int = 1, phase: str = "step"):
        """The row of a step that was measured, or has a reason; None where there is none."""
        model = next(name for name, shape in SIZES.items() if shape == step.shape)
        return metrics.row_of(self.table, model=model, context=step.context, batch=step.batch,
                              mode=step.mode, precision=step.precision, attention=step.attention,
                              step_number=number, phase=phase)  # fmt: skip

    def picture(self, table: str, step: StepMemory, number: int | None = 1) -> Picture | None:
        """A bulk table of the published device; None where it is not measured."""
        model = next(name for name, shape in SIZES.items() if shape == step.shape)
        parts = [model, step.context, step.mode, step.precision, step.attention]
        name = "-".join(map(str, parts + ([] if number is None else [number])))
        for root in self._roots or data.data_roots():
            if (data.PUBLISHED, name) in bulk.pictures(table, root):
                return bulk.read(table, data.PUBLISHED, name, root)
        return None


def step(
    context: int = SHOWN, mode: str = "train-step", precision: str = "fp32",
    attention: str = "eager", model: str = MODEL, first: bool = False,
) -> StepMemory:  # fmt: skip
    """A step of a named model, as it is counted."""
    return StepMemory(SIZES[model], BATCH, int(context), mode, precision, attention, first)


@functools.lru_cache(maxsize=512)
def counted(one: StepMemory) -> Peak:
    """The peak of its tensors."""
    return step_memory.peak(one)


@functools.lru_cache(maxsize=512)
def blocks(one: StepMemory, steps: int = 2) -> Replay:
    """The allocator's blocks for a process of so many such steps."""
    return step_memory.replay(one, steps)


def gb(size: float | None) -> str:
    """Bytes in units of 10^9, three figures."""
    return MISSING if size is None or pd.isna(size) else style.digits(float(size) / 1e9)


def mb(size: float) -> str:
    """Bytes in units of 10^6, with a thousands separator, one decimal below 100."""
    value = size / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"

"""The chapter's rows, loaded once, and what is predicted beside each of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.measured import Measured
from a2lib.report.tables import MISSING
from a2lib.theory.checkpointing import ATTENTION, BlockBytes, cost, plan
from a2lib.theory.strategy_memory import StrategyMemory, block_bytes, strategy_memory
from a2lib.theory.strategy_time import forward_work, milliseconds, repeated_work
from a2lib.theory.transformer import SIZES, Shape, state_bytes, step_flops

MODEL, BATCH, CONTEXT = "2.7B", 4, 2048
SHAPE = SIZES[MODEL]
LAYERS = SHAPE.num_layers
# (precision, attention) of the two settings; TF32 products change no byte of fp32.
WIDE, NARROW = ("tf32", "eager"), ("bf16", "flash")
TITLES = {WIDE: "fp32, eager attention", NARROW: "bf16, FlashAttention"}
GRADIENTS = {"fresh": "made by the backward", "kept": "there before"}
COMMAND = "papermill notebooks/checkpointing.ipynb -p sweep all"
# What is measured of each setting, as it is shown.
SEGMENTS = ("block", "segments:2", "segments:4", "segments:8", "segments:16")
STRATEGIES = {
    WIDE: ("none", "half", *SEGMENTS, "nested:4", "recursive", "selective:linear"),
    NARROW: ("none", "half", *SEGMENTS[:-1], "nested:4", "recursive", "chain")
    + ("selective:attention", "selective:linear"),
}
WORDS = {
    "none": "no checkpoint", "half": "half a block", "block": "1 block",
    "recursive": "halves of halves", "chain": "first input alone",
    "selective:linear": "linear layers kept", "selective:attention": "attention kept",
}  # fmt: skip


class Checkpointing(Measured):
    """What the chapter shows: ``table`` of the published device, ``local`` of any other."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        self.table, self.local = self.read("checkpointing")

    def row(self, strategy: str, gradients: str = "fresh", way: tuple[str, str] = WIDE,
            layers: int = LAYERS):  # fmt: skip
        """The row of one strategy, with a time or without; None where there is none."""
        return metrics.row_of(self.table, model=MODEL, layers=layers, context=CONTEXT, batch=BATCH,
                              precision=way[0], attention=way[1], strategy=strategy,
                              gradients=gradients)  # fmt: skip

    def timed(self, *which, **more):
        """The same where it has a time; None elsewhere."""
        row = self.row(*which, **more)
        return row if row is not None and row.status == "ok" else None


def shape(layers: int = LAYERS) -> Shape:
    return dataclasses.replace(SHAPE, num_layers=layers)


def _theory(way: tuple[str, str]) -> dict[str, str]:
    return {"attention": way[1], "precision": "bf16" if way[0] == "bf16" else "fp32"}


def block(way: tuple[str, str] = WIDE, gradients: str = "kept") -> BlockBytes:
    """I, A, M and G of one block."""
    return block_bytes(SHAPE, BATCH, CONTEXT, **_theory(way), fresh=gradients == "fresh")[0]


def attention_half(way: tuple[str, str] = WIDE) -> BlockBytes:
    """The same of a block's attention, gradients kept."""
    return block_bytes(SHAPE, BATCH, CONTEXT, **_theory(way), fresh=False)[1][ATTENTION]


def held(gradients: str, layers: int = LAYERS) -> int:
    """Bytes between steps: weights, AdamW's moments, and gradients where they are kept."""
    state = state_bytes(shape(layers))
    return state.total - (state.gradients if gradients == "fresh" else 0)


def predicted(strategy: str, gradients: str = "fresh", way: tuple[str, str] = WIDE,
              layers: int = LAYERS) -> StrategyMemory:  # fmt: skip
    """A step's memory beyond ``held``."""
    fresh = gradients == "fresh"
    return strategy_memory(shape(layers), BATCH, CONTEXT, strategy, **_theory(way), fresh=fresh)


def best(gradients: str, way: tuple[str, str] = WIDE) -> str:
    """The single-level segment of least predicted peak, the smaller of equals."""
    return min(SEGMENTS, key=lambda s: predicted(s, gradients, way).peak)


def total(strategy: str, gradients: str = "fresh", way: tuple[str, str] = WIDE) -> int:
    """All that is alive at the peak of a step, as predicted."""
    return held(gradients) + predicted(strategy, gradients, way).peak


def again(strategy: str, way: tuple[str, str] = WIDE, layers: int = LAYERS) -> float:
    """What backward computes again, in forwards of the model by the operations of its products."""
    of = shape(layers), BATCH, CONTEXT, way[1]
    return repeated_work(strategy, *of).operations / forward_work(*of).operations


def runs(strategy: str, layers: int) -> float:
    """Block runs that backward begins again, for each block."""
    return cost(plan(strategy, layers), BlockBytes(1, 1, 1)).runs / layers


def work(strategy: str, way: tuple[str, str] = WIDE) -> float:
    """Operations of a step under a strategy over those where every block is computed again."""
    whole = step_flops(SHAPE, BATCH, CONTEXT, causal=way[1] != "eager")
    of = SHAPE, BATCH, CONTEXT, way[1]
    repeated = [repeated_work(s, *of).operations for s in (strategy, "block")]
    return (whole + repeated[0]) / (whole + repeated[1])


def ms_again(c: Checkpointing, strategy: str, gradients: str, way: tuple[str, str],
             layers: int = LAYERS) -> float | None:  # fmt: skip
    """The time of what a strategy computes again, by the measured forward of ``block``."""
    base = c.timed("block", gradients, way, layers)
    if base is None or c.bandwidth is None:
        return None
    of = shape(layers), BATCH, CONTEXT, way[1], way[0]
    again_, forward = repeated_work(strategy, *of), forward_work(*of)
    return milliseconds(again_, forward, float(base.ms_forward), 1e12 * c.bandwidth)


def ms_predicted(c: Checkpointing, strategy: str, gradients: str, way: tuple[str, str],
                 layers: int = LAYERS) -> float | None:  # fmt: skip
    """The time of a step by that of ``block``, and what is computed again more or less."""
    mine, its = (ms_again(c, s, gradients, way, layers) for s in (strategy, "block"))
    if mine is None:
        return None
    return c.timed("block", gradients, way, layers).ms + mine - its


def words(strategy: str) -> str:
    """A strategy as the page calls it."""
    name, _, k = strategy.partition(":")
    if strategy in WORDS:
        return WORDS[strategy]
    return f"{k} blocks" if name == "segments" else f"two levels of {k}"


def gb(size: float | None) -> str:
    """Bytes in units of 10^9, three figures."""
    return MISSING if size is None or pd.isna(size) else style.digits(float(size) / 1e9)

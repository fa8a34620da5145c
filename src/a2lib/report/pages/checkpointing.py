"""Activation checkpointing: measured steps of each strategy beside what counting predicts."""

import dataclasses
import re

import pandas as pd

from a2lib.report import plots
from a2lib.report.page import one, pick
from a2lib.report.style import chart
from a2lib.shapes import SIZES
from a2lib.theory.memory.checkpointing import strategy_peak
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.transformer import parameter_count

SINGLE = ("block", "segments:2", "segments:4", "segments:8", "segments:16")  # one level of k blocks
NAMES = {
    "none": "no checkpoint",
    "half": "half a block",
    "block": "1 block",
    "segments:2": "2 blocks",
    "segments:4": "4 blocks",
    "segments:8": "8 blocks",
    "segments:16": "16 blocks",
    "nested:2": "two levels, of 2 blocks and 1",
    "nested:4": "two levels, of 4 blocks and 1",
    "recursive": "recursive halves",
    "chain": "first input only",
    "selective:linear": "1 block, linear outputs saved",
    "selective:attention": "1 block, attention's output saved",
}
FLASH = {"layers": 32, "precision": "bf16"}  # with FlashAttention
EAGER = {"layers": 32, "precision": "tf32"}  # with eager attention
# What a block saves for its backward, by the ends of the names of theory.memory.saved.
TENSORS = {
    "block's input": ("x0",),
    "Q, K, V": ("q", "k", "v0"),
    "attention's output": ("o", "lse"),
    "FFN's input": ("y0",),
    "FFN's gate and value": ("gate", "value"),
    "all else": ("root", "normal", "silu", "product", "x", "16"),
}

SETTINGS = {
    "fp32, eager": StepMemory(SIZES["2.7B"], 4, 2048),
    "bf16, Flash": StepMemory(SIZES["2.7B"], 4, 2048, precision="bf16", attention="flash"),
}


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add to each row, in bytes and ms:

    held: weights, moments and accumulated gradients, which exist between steps
    peak: the predicted peak above ``held``
    whole: ``held`` and the measured peak
    """
    rows = rows[rows["model"].isin(SIZES) & rows["strategy"].isin(NAMES)]
    held, peaks = [], []
    for row in rows.itertuples():
        step = _step(row)
        held.append((12 if step.fresh else 16) * parameter_count(step.shape))
        peaks.append(strategy_peak(step, row.strategy))
    rows = rows.assign(held=held, peak=peaks)
    return rows.assign(whole=rows["held"] + rows["peak_bytes"])


def _step(row) -> StepMemory:
    shape = dataclasses.replace(SIZES[row.model], num_layers=int(row.layers))
    precision = "bf16" if row.precision == "bf16" else "fp32"  # TF32 changes no byte
    return StepMemory(
        shape,
        int(row.batch),
        int(row.context),
        precision=precision,
        attention=row.attention,
        fresh=row.gradients == "fresh",
    )


@chart(height=3.6)
def frontier(figure, rows: pd.DataFrame, places: dict[str, tuple]):
    """Draw each strategy's time over its measured peak, with the times' 20th and 80th percentiles
    and, at its place in points from there, its name."""
    ax = figure.subplots()
    for strategy, place in places.items():
        row = one(rows, strategy=strategy)
        below, above = row.ms - row.ms_p20, row.ms_p80 - row.ms
        ax.errorbar(row.whole / 1e9, row.ms, [[below], [above]], color="#0072b2", marker="o")
        plots.label(ax, NAMES[strategy], (row.whole / 1e9, row.ms), place)
    ax.set(xlabel="GB at the peak", ylabel="ms per step")
    ax.set_ylim(470, 645)
    ax.set_xlim(left=45)


def block_tensors() -> dict[str, int]:
    """Return the bytes that a block saves for its backward (bf16, FlashAttention) by TENSORS."""
    sizes = dict.fromkeys(TENSORS, 0)
    kind_of = {end: kind for kind, ends in TENSORS.items() for end in ends}
    for name, size in SETTINGS["bf16, Flash"].saved.items():
        sizes[kind_of[re.split("[/.]", name)[-1]]] += size
    return sizes


def strategy_row(rows: pd.DataFrame, strategy: str, setting: dict, gradients: str = "fresh"):
    """Return the row of a strategy in a setting (FLASH or EAGER); ``gradients`` is "fresh" (made by
    the backward) or "kept" (accumulated)."""
    return one(rows, strategy=strategy, gradients=gradients, **setting)


def lowest(rows: pd.DataFrame, strategies, **where) -> str:
    """Return the strategy with the lowest measured peak."""
    few = pick(rows, strategy=list(strategies), **where).dropna(subset=["peak_bytes"])
    return few.loc[few["peak_bytes"].astype(float).idxmin(), "strategy"]

"""Activation checkpointing: measured steps of each strategy beside what counting predicts."""

import dataclasses
import re

import pandas as pd

from a2lib.report import plots
from a2lib.report.page import one, pick
from a2lib.report.style import Chart
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
    "normalized inputs": ("root", "normal"),
    "Q, K, V": ("q", "k", "v0"),
    "attention's output": ("o", "lse"),
    "FFN's input": ("y0",),
    "FFN's gate and value": ("gate", "value"),
    "SiLU and product": ("silu", "product"),
    "bf16 copies of inputs": ("x",),
    "bf16 copies of weights": ("16",),
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


def peak_bars(rows: pd.DataFrame, strategies: tuple[str, ...]) -> Chart:
    """Draw the measured peak of each strategy in GB, what stays between steps apart, with the peak
    and the time of a step beside the bar."""
    few = [one(rows, strategy=strategy) for strategy in strategies]
    names = {"weights and moments": "#808080", "everything else at the peak": "#00825f"}
    sizes = [(row.held / 1e9, (row.whole - row.held) / 1e9) for row in few]
    frame = pd.DataFrame(sizes, [NAMES[row.strategy] for row in few], list(names))
    words = [f"{row.whole / 1e9:.0f} GB, {row.ms:,.0f} ms" for row in few]
    xlabel = "GB at the peak"
    return plots.stacks(frame, names, 3.9, text=words, numbers=False, xlabel=xlabel, room=0.7)


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

"""Checkpointing: the measured steps of each strategy beside what theory says of them."""

import dataclasses

import numpy as np
import pandas as pd

from a2lib.report.metrics import copy_bandwidth
from a2lib.report.plots import label
from a2lib.report.style import COLOURS, chart
from a2lib.report.units import gb
from a2lib.theory.memory.checkpointing import BlockBytes
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.memory.strategies import FFN, HALVES, block_bytes, block_moments, strategy_memory
from a2lib.theory.strategy_time import forward_work, milliseconds, repeated_work
from a2lib.theory.transformer import SIZES, state_bytes

SINGLE = ("block", "segments:2", "segments:4", "segments:8", "segments:16")  # one level of k blocks
NAMES = {
    "none": "no checkpoint",
    "half": "half a block",
    "block": "1 block",
    "segments:2": "2 blocks",
    "segments:4": "4 blocks",
    "segments:8": "8 blocks",
    "segments:16": "16 blocks",
    "nested:2": "two levels of 2",
    "nested:4": "two levels of 4",
    "recursive": "halves of halves",
    "chain": "first input alone",
    "selective:linear": "linear layers kept",
    "selective:attention": "attention kept",
}

SETTINGS = {
    "fp32, eager": StepMemory(SIZES["2.7B"], 4, 2048),
    "bf16, Flash": StepMemory(SIZES["2.7B"], 4, 2048, precision="bf16", attention="flash"),
}
KERNELS = {
    "w2": "multiplies with w2",
    "widen w2's": "w2's gradient to fp32",
    "gate": "gate times value",
    "w1 w3": "multiplies with w1 and w3",
    "output": "multiplies with the output matrix",
    "do v^T": "multiply for dP",
    "softmax": "softmax",
    "flash": "FlashAttention",
    "rope": "RoPE",
    "q k v": "multiplies with q, k and v",
    "norm": "norm",
}


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The rows with, in bytes and ms: ``held``, what stays between steps; ``peak``, the predicted
    peak beyond it; ``whole``, held and the measured peak; ``again``, the forwards that backward
    repeats; ``ms_expected``, from the measured step of one block at a time."""
    rows = rows[rows["model"].isin(SIZES) & rows["strategy"].isin(NAMES)]
    rate = copy_bandwidth(rows_of("ceiling"))
    found = rows.assign(**pd.DataFrame([_theory(r) for r in rows.itertuples()], index=rows.index))
    found["name"] = found["strategy"].map(NAMES)
    found["whole"] = found["held"] + found["peak_bytes"]
    key = ["model", "layers", "precision", "attention", "gradients"]
    base = found[found["strategy"] == "block"].set_index(key)[["ms", "ms_forward"]]
    base = found[key].join(base, on=key)
    found["ms_expected"] = [
        row.ms + _beyond(r, row.ms_forward, rate) if rate else None
        for r, row in zip(found.itertuples(), base.itertuples(), strict=True)
    ]
    return found


def _step(row) -> StepMemory:
    shape = dataclasses.replace(SIZES[row.model], num_layers=int(row.layers))
    precision = "bf16" if row.precision == "bf16" else "fp32"  # TF32 changes no byte
    how = {"precision": precision, "attention": row.attention, "fresh": row.gradients == "fresh"}
    return StepMemory(shape, int(row.batch), int(row.context), **how)


def _theory(row) -> dict:
    step = _step(row)
    state = state_bytes(step.shape)
    _, peak = strategy_memory(step, row.strategy)
    return {
        "held": state.total - (state.gradients if step.fresh else 0),
        "peak": peak,
        "again": repeated_work(row.strategy, step).operations / forward_work(step).operations,
    }


def _beyond(row, ms_forward: float, rate: float) -> float:
    """What a strategy computes again more than one block at a time does, in ms."""
    step = _step(row)
    this, block = (
        milliseconds(repeated_work(s, step), forward_work(step), ms_forward, rate * 1e12)
        for s in (row.strategy, "block")
    )
    return this - block


@chart(height=3.4)
def frontier(figure, rows: pd.DataFrame, strategies: dict[str, tuple[float, float]]):
    """Peak against the time of a step, a labelled dot a strategy; each with where its words stand,
    in points off the dot."""
    ax = figure.subplots()
    for strategy, at in strategies.items():
        row = rows[rows["strategy"] == strategy].iloc[0]
        colour = COLOURS[0] if strategy == "block" else COLOURS[1]
        ax.plot(row["ms"], row["whole"] / 1e9, "o", color=colour, markersize=7)
        label(ax, NAMES[strategy], (row["ms"], row["whole"] / 1e9), at)
    ax.set(xlabel="a step, ms", ylabel="peak, GB", xscale="log")
    ax.set_xticks([500, 1000, 2000, 3000], ["500", "1,000", "2,000", "3,000"])
    ax.minorticks_off()
    ax.set_xlim(430, 4200)
    ax.set_ylim(0, 105)


@chart(height=2.8)
def backward(figure, block: BlockBytes, blocks: int):
    """What is alive while each block goes backward, one checkpoint a block, fresh gradients, GB."""
    ax = figure.subplots()
    done = np.arange(blocks)
    waits, made = (blocks - 1 - done) * block.input, done * block.gradients
    parts = np.array([waits, made, np.full(blocks, block.peak)]) / 1e9
    ax.stackplot(done + 1, parts, colors=("#86b6e6", "#f0ad78", "#eeeeee"))
    ax.annotate("inputs that wait", (2, 0.6))
    ax.annotate("gradients made so far", (20, 3.2))
    ax.annotate("the block that goes backward", (20, 12.2), rotation=0, ha="center")
    ax.set(xlabel="blocks gone backward", ylabel="GB beyond what stays", xlim=(1, blocks))


def units_and_moments() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables in GB of one block of the 2.7B model, batch 4, 2,048 tokens: I, A, G and M by setting;
    and what is alive at each kernel of its backward, gradients kept, a column a setting."""
    units, alive = [], {}
    for setting, fresh in SETTINGS.items():
        step = dataclasses.replace(fresh, fresh=False)
        kept, halves = block_bytes(step)
        sizes = kept.input, kept.saved, kept.gradients, kept.peak, block_bytes(fresh)[0].peak
        units.append([setting, *(gb(s, 3) for s in sizes)])
        for m in block_moments(step):
            saved = halves[HALVES[0]].saved if m.half == FFN else 0
            key = ("FFN" if m.half == FFN else m.half, KERNELS[m.kernel])
            alive.setdefault(key, {})[setting] = gb(m.bytes + saved, 3)
    order = sorted(alive, key=lambda key: (key[0] != "FFN", list(KERNELS.values()).index(key[1])))
    lines = pd.DataFrame([[*key, *map(alive[key].get, SETTINGS)] for key in order])
    lines.columns = ["half", "kernel", *SETTINGS]
    names = ["setting", "I", "A", "G", "M, kept gradients", "M, fresh"]
    return pd.DataFrame(units, columns=names), lines

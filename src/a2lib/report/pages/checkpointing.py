"""Checkpointing: the measured steps of each strategy beside what theory says of them."""

import dataclasses

import numpy as np
import pandas as pd

from a2lib.report.metrics import copy_bandwidth
from a2lib.report.plots import label
from a2lib.report.style import COLOURS, chart
from a2lib.report.units import gb
from a2lib.theory.attention import attention_flops
from a2lib.theory.memory.checkpointing import BlockBytes, block_bytes, repeated, strategy_peak
from a2lib.theory.memory.step import StepMemory, block_peaks
from a2lib.theory.products import matmul_flops
from a2lib.theory.step_floor import eager_step
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
        row.ms + _beyond_one_block(r, row.ms_forward, rate * 1e12) if rate else None
        for r, row in zip(found.itertuples(), base.itertuples(), strict=True)
    ]
    return found


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


def _theory(row) -> dict:
    step = _step(row)
    state = state_bytes(step.shape)
    linear, attention, head = _forward_flops(step)
    again = repeated(row.strategy, step)
    flops = again["linear"] * linear + again["attention"] * attention
    return {
        "held": state.total - (state.gradients if step.fresh else 0),
        "peak": strategy_peak(step, row.strategy),
        "again": flops / (linear + attention + head),
    }


def _forward_flops(step: StepMemory) -> tuple[int, int, int]:
    """Operations of a forward: of the blocks' linear layers, of attention, which is eager with
    every score, else with half of them, and of the head."""
    s, tokens = step.shape, step.batch * step.context
    linear = s.num_layers * 2 * tokens * s.block_matrices
    causal = step.attention != "eager"
    sizes = step.batch, s.num_heads, step.context, step.context, s.head_dim
    attention = s.num_layers * attention_flops(*sizes, causal, "forward")
    return linear, attention, matmul_flops(tokens, s.vocab_size, s.d_model)


def _beyond_one_block(row, ms_forward: float, bytes_per_s: float) -> float:
    """What a strategy computes again more than one block at a time does, in ms.

    What stands between products takes the time of its bytes, eager attention with its products
    among it, and products that of the rest of the measured forward.
    """
    step = _step(row)
    linear, attention, head = _forward_flops(step)
    forward = [
        kernel
        for kernel in eager_step(step.shape, step.batch, step.context, step.precision)
        if kernel.phase == "forward"
    ]
    ms = {"attention": 0.0, "elementwise": 0.0}
    for kernel in forward:
        if kernel.part in ms:
            moved = kernel.count * (kernel.read + kernel.written)
            ms[kernel.part] += 1e3 * moved / bytes_per_s
    if step.attention == "flash":
        ms_products = ms_forward - ms["elementwise"]
        ms["attention"] = ms_products * attention / (linear + attention + head)
    else:
        ms_products = ms_forward - ms["elementwise"] - ms["attention"]
        attention = 0
    ms["linear"] = ms_products * linear / (linear + attention + head)
    ms["rest"] = ms["elementwise"]
    this, block = (repeated(strategy, step) for strategy in (row.strategy, "block"))
    return sum((this[part] - block[part]) * ms[part] for part in this)


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


def units() -> pd.DataFrame:
    """Return a table in GB of one block of the 2.7B model, batch 4, 2,048 tokens: I, A, G and M by
    setting, and of M what is left of A, and what is temporary."""
    lines = []
    for setting, fresh in SETTINGS.items():
        kept = dataclasses.replace(fresh, fresh=False)
        block = block_bytes(kept)[0]
        fullest = max(block_peaks(kept), key=lambda half: half.total)
        sizes = [block.input, block.saved, block.gradients, block.peak]
        sizes += [fullest.saved, fullest.temporary, block_bytes(fresh)[0].peak]
        lines.append([setting, *(gb(size, 3) for size in sizes)])
    names = ["setting", "I", "A", "G", "M, kept gradients", "of it saved", "temporary", "M, fresh"]
    return pd.DataFrame(lines, columns=names)

"""Mixed precision: sums as exact arithmetic predicts them, and what bf16 gains by model size."""

import numpy as np
import pandas as pd

from a2lib.report.metrics import ceilings, copy_bandwidth, floors
from a2lib.report.page import one
from a2lib.report.plots import label
from a2lib.report.style import COLOURS, INK, chart
from a2lib.shapes import SIZES
from a2lib.theory.floating import Loop, decimal
from a2lib.theory.roofline import Floor
from a2lib.theory.step_floor import eager_step

MODELS = ("small", "medium", "large", "xl25", "2.7B", "10B")
BATCH, CONTEXT = 4, 512
LOSS_SCALE = 2**16  # with which torch.amp.GradScaler begins
SHADES = {"fp32": COLOURS[1], "fp16": COLOURS[2], "bf16": COLOURS[0]}


def loop(total: str, addend: str, terms: int = 1000) -> Loop:
    """Return the handout's loop of these formats, or that of 10,000 terms."""
    return Loop(total, addend, terms, {1000: "0.01", 10_000: "0.001"}[terms])


def sums(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each loop ``predicted``, its result by exact arithmetic, with every digit."""
    predicted = []
    for row in rows.itertuples():
        same = Loop(row.sum_dtype, row.addend_dtype, int(row.terms), row.addend, row.cast)
        predicted.append(decimal(same.result()))
    return rows.assign(predicted=predicted)


def pass_ms(
    rows: pd.DataFrame, model: str, pass_: str, precision: str, launched: bool = False
) -> float:
    """Return the ms of an eager forward or backward at 512 tokens, NaN where it ran out of memory.

    It is GPU time in a CUDA graph, a backward being what forward and backward take beyond the
    forward; or, if ``launched``, the time from Python.
    """
    same = {"model": model, "precision": precision, "context": CONTEXT}
    same |= {"attention": "eager", "compile": "none"}
    if launched:
        return one(rows, mode="forward-backward", capture=False, phase=pass_, **same).ms
    in_graph = {"capture": True, "phase": "wall", **same}
    forward_ms = one(rows, mode="forward", **in_graph).ms
    if pass_ == "forward":
        return forward_ms
    return one(rows, mode="forward-backward", **in_graph).ms - forward_ms


def gain(rows: pd.DataFrame, model: str, pass_: str = "forward", launched: bool = False) -> float:
    """Return how many times as fast as in fp32 a pass is in bf16 (``pass_ms``)."""
    fp32_ms = pass_ms(rows, model, pass_, "fp32", launched)
    return fp32_ms / pass_ms(rows, model, pass_, "bf16", launched)


def least(model: str, precision: str, ceiling: pd.DataFrame) -> dict[str, Floor]:
    """Return the ``floors`` of an eager forward's kernels by the best measured rates."""
    forward = []
    for kernel in eager_step(SIZES[model], BATCH, CONTEXT, precision):
        if kernel.phase == "forward":
            forward.append(kernel)
    return floors(forward, ceilings(ceiling), copy_bandwidth(ceiling), precision)


@chart(height=3.0)
def running(figure):
    """Draw a thousand times 0.01 added up in three formats, as exact arithmetic predicts them."""
    ax, terms = figure.subplots(), 1000
    at = np.append(np.arange(0, terms, 4), terms - 1)
    for name, up in {"fp32": 6, "fp16": -6, "bf16": 0}.items():
        partial = np.array(loop(name, name, terms).partial_sums(), dtype=float)
        ax.plot(at + 1, partial[at], color=SHADES[name], linewidth=2)
        label(ax, name, (terms, partial[-1]), (5, up), va="center")
    ax.plot([0, terms], [0, 10], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.set(xlim=(0, terms), ylim=(0, 11), xlabel="additions of 0.01 (dashed: exact)")
    ax.set_ylabel("running sum")
    ax.xaxis.set_major_formatter("{x:,.0f}")

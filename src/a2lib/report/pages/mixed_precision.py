"""Mixed precision: sums as exact arithmetic predicts them, and what bf16 gains by model size."""

import numpy as np
import pandas as pd

from a2lib.report.metrics import ceilings, copy_bandwidth
from a2lib.report.page import one
from a2lib.report.plots import label
from a2lib.report.style import COLOURS, INK, chart
from a2lib.shapes import SIZES
from a2lib.theory.floating import Loop, decimal
from a2lib.theory.transformer import forward_flops, parameter_count

MODELS = ("small", "medium", "large", "xl25", "2.7B", "10B")
BATCH, CONTEXT = 4, 512
# How often an eager block's forward reads or writes a tensor of each kind beside its matmuls.
ACCESSES = {"residual": 20, "hidden": 5, "scores": 12}
CAST_BYTES = 6  # autocast reads a weight in fp32 and writes it in bf16, in every forward
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


def binades(each: Loop) -> pd.DataFrame:
    """Return the additions of a loop by the power of two that the sum had reached before each,
    their ``start``: how many they are, and ``gain``, what most of them added."""
    partial = np.array(each.partial_sums())
    before = partial[:-1]
    start = 2.0 ** np.floor(np.log2(before))
    additions = pd.DataFrame({"start": start, "gain": np.diff(partial)}).groupby("start")["gain"]
    most = additions.agg(lambda gains: gains.mode()[0])
    return pd.DataFrame({"additions": additions.size(), "gain": most}).reset_index()


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
    in_graph = {"capture": True, "phase": "step", **same}
    forward_ms = one(rows, mode="forward", **in_graph).ms
    if pass_ == "forward":
        return forward_ms
    return one(rows, mode="forward-backward", **in_graph).ms - forward_ms


def gain(
    rows: pd.DataFrame,
    model: str,
    pass_: str = "forward",
    precision: str = "bf16",
    launched: bool = False,
) -> float:
    """Return how many times as fast as in fp32 a pass is (``pass_ms``)."""
    fp32_ms = pass_ms(rows, model, pass_, "fp32", launched)
    return fp32_ms / pass_ms(rows, model, pass_, precision, launched)


def estimate(model: str, ceiling: pd.DataFrame) -> dict[str, float]:
    """Return what counting says of an eager forward, in ms.

    matmuls, matmuls_bf16: at the best measured rates
    rest: everything else, as accesses to fp32 tensors at the best bandwidth
    casts: of the weights to bf16
    gain: of bf16 over fp32
    """
    rates, bandwidth = ceilings(ceiling), copy_bandwidth(ceiling)
    shape = SIZES[model]
    tokens = BATCH * CONTEXT
    elements = {"residual": tokens * shape.d_model, "hidden": tokens * shape.d_ff}
    elements["scores"] = BATCH * shape.num_heads * CONTEXT**2
    accesses = sum(ACCESSES[kind] * number for kind, number in elements.items())
    weights = parameter_count(shape) - shape.vocab_size * shape.d_model
    flops = forward_flops(shape, BATCH, CONTEXT)
    ms = {
        "matmuls": flops / rates["fp32"] / 1e9,
        "matmuls_bf16": flops / rates["bf16"] / 1e9,
        "rest": 4 * shape.num_layers * accesses / bandwidth / 1e9,
        "casts": CAST_BYTES * weights / bandwidth / 1e9,
    }
    fp32, bf16 = ms["matmuls"] + ms["rest"], ms["matmuls_bf16"] + ms["rest"] + ms["casts"]
    return ms | {"gain": fp32 / bf16}


@chart(height=3.0)
def running(figure):
    """Draw 10,000 times 0.001 added up in three formats, as exact arithmetic predicts them."""
    ax, terms = figure.subplots(), 10_000
    for name, colour in SHADES.items():
        partial = loop(name, name, terms).partial_sums()
        at = [*range(0, terms, 40), terms - 1]
        ax.plot([i + 1 for i in at], [partial[i] for i in at], color=colour, linewidth=2)
        label(ax, name, (terms, partial[-1]), va="center")
    ax.plot([0, terms], [0, 10], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.set(xlim=(0, terms), ylim=(0, 11), xlabel="additions of 0.001 (dashed: exact)")
    ax.set_ylabel("running sum")
    ax.xaxis.set_major_formatter("{x:,.0f}")

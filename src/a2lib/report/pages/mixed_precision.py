"""Mixed precision: sums as exact arithmetic predicts them, and what bf16 gains by model size."""

import numpy as np
import pandas as pd

from a2lib.report.metrics import ceilings, copy_bandwidth
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


def gains(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return a row for each model, pass and precision of eager mode at 512 tokens.

    ms: GPU time, of a step in a CUDA graph; a backward is what forward and backward take beyond the
        forward. A model whose bf16 step was launched from Python, too, has the passes "forward,
        launched" and "backward, launched" of that.
    gain: fp32's time over it
    estimate: a bf16 forward's gain by counting (``estimate``)
    """
    few = rows[(rows["context"] == CONTEXT) & (rows["compile"] == "none")]
    few = few[(few["attention"] == "eager") & few["model"].isin(MODELS)]
    few = few[few["mode"].isin(["forward", "forward-backward"])]
    launched = few[~few["capture"] & (few["mode"] == "forward-backward")]
    few = few[few["capture"] & (few["phase"] == "step")]
    wide = few.pivot_table("ms", ["model", "precision"], "mode", sort=False).dropna(how="all")
    if wide.empty:
        return rows.iloc[:0]
    wide["backward"] = wide["forward-backward"] - wide["forward"]
    both = launched[launched["precision"] == "bf16"].dropna(subset=["ms"])["model"]
    launched = launched[launched["model"].isin(both)]
    launched = launched.pivot_table("ms", ["model", "precision"], "phase")
    launched = launched.reindex(columns=["forward", "backward"]).add_suffix(", launched")
    wide = wide.join(launched)
    passes = wide.columns.drop("forward-backward")
    long = wide[passes].stack().rename("ms").dropna().reset_index()
    long = long.rename(columns={"mode": "pass", "level_2": "pass"})
    base = long[long["precision"] == "fp32"].set_index(["model", "pass"])["ms"]
    long["gain"] = long.join(base.rename("fp32"), on=["model", "pass"])["fp32"] / long["ms"]
    estimated = (long["pass"] == "forward") & (long["precision"] == "bf16")
    ceiling = rows_of("ceiling")
    estimates = {model: estimate(model, ceiling)["gain"] for model in set(long["model"])}
    long["estimate"] = long["model"].map(estimates).where(estimated)
    same = {c: few[c].iloc[0] for c in ("device", "file", "local", "run")}
    return long.assign(status="ok", **same)


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
    colours = {"fp32": COLOURS[1], "fp16": COLOURS[2], "bf16": COLOURS[0]}
    ax, terms = figure.subplots(), 10_000
    for name, colour in colours.items():
        partial = loop(name, name, terms).partial_sums()
        at = [*range(0, terms, 40), terms - 1]
        ax.plot([i + 1 for i in at], [partial[i] for i in at], color=colour, linewidth=2)
        label(ax, name, (terms, partial[-1]), va="center")
    ax.plot([0, terms], [0, 10], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    ax.set(xlim=(0, terms), ylim=(0, 11), xlabel="additions of 0.001 (dashed: exact)")
    ax.set_ylabel("running sum")
    ax.xaxis.set_major_formatter("{x:,.0f}")

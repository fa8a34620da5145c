"""Read the traces of a training step: kernel time by phase and class, and its least time."""

import re

import numpy as np
import pandas as pd

from a2lib.report import panels, plots, traces
from a2lib.report.metrics import moved_bytes
from a2lib.report.page import one, pick
from a2lib.report.plots import stacked
from a2lib.report.style import Chart, Look, Looks, chart
from a2lib.report.units import digits
from a2lib.shapes import SIZES
from a2lib.theory.step_floor import eager_step

SETTING = ["model", "context", "batch", "mode", "precision", "attention", "compile"]
TRACE = [*SETTING, "profiler"]
CASE = [*TRACE, "phase"]
# Precision, attention, compile -> the configuration's name; fused: FlashAttention, compiled blocks.
WAYS = {
    ("fp32", "eager", "none"): "fp32",
    ("fp32", "eager", "blocks"): "fp32, compiled",
    ("bf16", "eager", "none"): "bf16",
    ("bf16", "flash", "blocks"): "bf16, fused",
    ("bf16_weights", "flash", "blocks"): "16-bit weights, fused",
}
# A class of kernels -> its column, and its colour.
CLASSES = {
    "matmuls": "matmul",
    "fused attention": "flash",
    "elementwise, norms, softmax": "between",
    "copies and casts": "copies",
    "AdamW": "adamw",
}
COLOURS = {
    "matmuls": "#0072b2",
    "fused attention": "#d55e00",
    "elementwise, norms, softmax": "#00825f",
    "copies and casts": "#b0558a",
    "AdamW": "#444444",
}
INSIDE = "attn.attention."
# What a block does between its matmuls -> the ranges that launch it.
BETWEEN = {
    "masked": (INSIDE + "scores", INSIDE + "softmax"),
    "gate": ("ffn",),
    "rope": ("attn", INSIDE + "values"),
    "norms": ("ln1", "ln2", "block"),
}
CAST = r"triton_poi_fused(__to_copy(_cat)?|_cat)_\d+"
# An fp32 step's model and configuration -> its line over the tokens.
LENGTHS = Looks(
    {
        ("2.7B", "fp32, compiled"): Look("3.4B, compiled", "#d55e00", "s"),
        ("small", "fp32, compiled"): Look("small, compiled", "#0072b2", "s"),
        ("2.7B", "fp32"): Look("3.4B", "#d55e00", "o"),
        ("xl25", "fp32"): Look("2.0B", "#00825f", "o"),
        ("large", "fp32"): Look("large", "#b0558a", "o"),
        ("medium", "fp32"): Look("medium", "#444444", "o"),
        ("small", "fp32"): Look("small", "#0072b2", "o"),
    }
)
SOFTMAX_FLOPS = 5  # per score: compare, subtract, exponential, add, divide
SOFTMAX_BYTES = 8  # per score: read and written, in fp32 in either precision


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add to each row the sums of its phase's kernels ("step": of all phases); times in ms.

    way: the configuration's name in WAYS
    matmul, flash, copies, adamw, between, total: kernel time (``traces.ms_by_class``)
    rest, share: of all kernels except matmul and flash; the share of these two
    kernels: calls
    casts: compiled casts and joins of weights
    flash_calls: calls of fused attention
    top, top_kind, top_calls, top_ms, top_share: the name that takes most, of all its launches
    scores, values, softmax, softmax_ratio, those of BETWEEN: parts of a forward
    softmax_casts: autocast's casts of the scores, before and after the softmax
    multiply_flops, ...: by counting (``count_work``)
    quick, slow: the phase in the quickest and in the slowest process that timed it
    idle_least: the share of the quickest in which no kernel runs
    replay: the step as a CUDA graph
    """
    configurations = pd.MultiIndex.from_frame(rows[["precision", "attention", "compile"]])
    rows = rows.assign(way=pd.Series(configurations.map(WAYS), rows.index).fillna("other"))
    sums = trace_sums(rows)
    if len(sums):
        types = {"context": rows["context"].dtype, "batch": rows["batch"].dtype}
        rows = rows.merge(sums.astype(types), on=CASE, how="left")
    counted = [count_work(row) for row in rows.itertuples()]
    rows = rows.join(pd.DataFrame(counted))
    return add_timers(rows, rows_of("benchmark"), rows_of("compile_model"))


def trace_sums(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each phase of each trace, and for its step, with the sums of its kernels."""
    kernels = traces.kernels(rows)
    if kernels.empty:
        return kernels
    kernels = pd.concat([kernels, kernels.assign(phase="step")], ignore_index=True)
    sums = traces.ms_by_class(kernels, CASE)
    sums["rest"] = sums["total"] - sums["matmul"] - sums["flash"]
    sums["share"] = 1 - sums["rest"] / sums["total"]
    sums["kernels"] = kernels.groupby(CASE)["calls"].sum()
    sums["casts"] = kernels[kernels["kernel"].str.fullmatch(CAST)].groupby(CASE)["ms"].sum()
    sums["flash_calls"] = kernels[kernels["kind"] == "attention"].groupby(CASE)["calls"].sum()
    sums = sums.join(top_kernels(kernels)).join(forward_parts(kernels))
    sums["top_share"] = sums["top_ms"] / sums["total"]
    return sums.reset_index()


def top_kernels(kernels: pd.DataFrame) -> pd.DataFrame:
    """Return each phase's top kernel, of all launches of a name: its name, kind, ms and calls."""
    named = kernels[kernels["kernel"] != "rest"].groupby([*CASE, "kernel", "kind"])
    names = named.agg(top_ms=("ms", "sum"), top_calls=("calls", "sum"))
    names = names.sort_values("top_ms", ascending=False).reset_index(["kernel", "kind"])
    names = names.rename(columns={"kernel": "top", "kind": "top_kind"})
    return names[~names.index.duplicated()]


def short_name(kernel: str, kind: str) -> str:
    """Return what tells a kernel from others: family, tile and operands of a matmul, or a word."""
    words = {"optimizer": "AdamW", "copy": "cast or copy"}
    if kind != "matmul":
        return words.get(kind, kind)
    family = next((name for name in ("xmma", "sgemm", "nvjet") if name in kernel), "matmul")
    tile = re.search(r"(\d+x\d+)", kernel)
    operands = re.search(r"_([tn][tn])_|_([TN][TN])[TN]$", kernel)
    parts = [family]
    if tile:
        parts.append(tile[1])
    if operands:
        parts.append((operands[1] or operands[2]).lower())
    return f"`{' '.join(parts)}`"


def forward_parts(kernels: pd.DataFrame) -> pd.DataFrame:
    """Return the kernel time of each forward's parts: those of BETWEEN, and of eager attention."""
    kernels = kernels[kernels["phase"] == "forward"]
    matmuls = kernels[kernels["kind"] == "matmul"]
    others = kernels[kernels["kind"] != "matmul"]
    sums = pd.DataFrame(index=kernels.groupby(CASE).size().index)
    for name, ranges in BETWEEN.items():
        sums[name] = others[others["part"].isin(ranges)].groupby(CASE)["ms"].sum()

    def ms_in(part: str, of: pd.DataFrame) -> pd.Series:
        return of[of["part"] == INSIDE + part].groupby(CASE)["ms"].sum()

    sums["scores"] = ms_in("scores", matmuls)
    sums["values"] = ms_in("values", matmuls)
    sums["softmax"] = ms_in("softmax", kernels[kernels["kind"] != "copy"])
    copies = kernels[kernels["kind"] == "copy"]
    to_bf16 = copies[copies["kernel"].str.contains("bfloat16_copy")]
    for part, casts in (("softmax", copies), ("values", to_bf16)):
        sums[f"{part}_casts"] = ms_in(part, casts)
    casts = ["softmax_casts", "values_casts"]
    sums["softmax_casts"] = sums[casts].sum(axis=1)
    sums = sums.drop(columns="values_casts")
    sums["softmax_ratio"] = sums["softmax"] / (sums["scores"] + sums["values"])
    return sums


def add_timers(rows: pd.DataFrame, steps: pd.DataFrame, compiled: pd.DataFrame) -> pd.DataFrame:
    """Add what timers in other processes say of the same phase: quick, slow, replay and idle."""
    case = [*SETTING, "phase"]
    launched = steps[~steps["capture"] & (steps["warmup"] > 0)]
    timers = [rows.assign(ms=rows["ms_timer"]), launched, compiled]
    timers = [timer[[*case, "ms"]] for timer in timers if len(timer)]
    timers = pd.concat(timers).dropna()
    rows = rows.join(timers.groupby(case)["ms"].agg(quick="min", slow="max"), on=case)
    replayed = steps[steps["capture"] & (steps["status"] == "ok")].drop_duplicates(case)
    rows = rows.join(replayed.set_index(case)["ms"].rename("replay"), on=case)
    rows["idle_least"] = (1 - rows["ms_busy"] / rows["quick"]).clip(lower=0)
    return rows


def count_work(row) -> dict:
    """Return what counting tells of the attention in an eager forward (multiply_flops,
    multiply_bytes, softmax_flops, softmax_bytes), and nothing for another row."""
    if row.phase != "forward" or row.way not in ("fp32", "bf16") or row.model not in SIZES:
        return {}
    shape, batch, context = SIZES[row.model], int(row.batch), int(row.context)
    kernels = eager_step(shape, batch, context, row.precision)
    matmuls, flops = [], 0
    for kernel in kernels:
        if kernel.phase == "forward" and kernel.name == "scores":
            matmuls.append(kernel)
            flops += kernel.count * kernel.flops
    scores = shape.num_layers * batch * shape.num_heads * context**2
    return {
        "multiply_bytes": moved_bytes(matmuls),
        "multiply_flops": flops,
        "softmax_bytes": SOFTMAX_BYTES * scores,
        "softmax_flops": SOFTMAX_FLOPS * scores,
    }


def traced(
    rows: pd.DataFrame,
    model: str,
    way: str,
    phase: str = "step",
    context: int = 512,
    mode: str = "train-step",
):
    """Return the row of a phase of a training step (or a forward) that Nsight Systems traced."""
    case = {"model": model, "way": way, "phase": phase, "context": context, "mode": mode}
    return one(rows, **case, profiler="nsys")


def by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by configuration (the nameless last), then by model size, then by context."""
    way_place = pd.Index([*WAYS.values(), "other"]).get_indexer(rows["way"])
    model_place = pd.Index(list(SIZES)).get_indexer(rows["model"])
    # The key that decides first is the last.
    return rows.iloc[np.lexsort([rows["context"], model_place, way_place])]


def tops(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each fp32 forward (phase "forward"), and for it with its backward
    ("step"): the first trace by mode that stores its top kernel's full name, as some cut names
    short ("…")."""
    cases = {"forward": "forward", "forward-backward": ["forward", "step"], "train-step": "step"}
    few = []
    for mode, phase in cases.items():
        few.append(pick(rows, way="fp32", profiler="nsys", mode=mode, phase=phase))
    traced = pd.concat(few)
    traced = traced[~traced["top"].str.endswith("…")]
    return by_size(traced.drop_duplicates(["model", "context", "phase"]))


def shares_by_length(rows: pd.DataFrame) -> Chart:
    """Draw the share of matmuls in the kernel time of fp32 steps over their tokens, a line for each
    model, eager or in compiled blocks."""
    line_of = pd.Series(list(zip(rows["model"], rows["way"], strict=True)), rows.index)
    rows = rows.assign(line=line_of, percent=100 * rows["share"].astype(float))

    def draw(figure):
        ax = figure.subplots()
        ends = plots.lines(ax, rows, "context", "percent", "line", LENGTHS)
        panels.doubling_axis(ax)
        ax.set(xlabel="tokens", ylabel="matmuls in kernel time (%)")
        panels.name_ends(figure, ends, LENGTHS)

    return Chart(draw, height=3.2)


@chart(height=4.4)
def ways(figure, steps: dict[str, list]):
    """Draw the share of each class in the kernel time of steps, with the sum at each bar's end, a
    panel for each model; ``steps`` are the rows of the traced steps by model."""
    axes = figure.subplots(len(steps), 1)
    for ax, (model, rows) in zip(axes, steps.items(), strict=True):
        table = pd.DataFrame(rows).set_index("way")
        shares = 100 * table[list(CLASSES.values())].div(table["total"], axis=0)
        bars = shares.set_axis(list(CLASSES), axis=1)
        sums = [f"{digits(total, 3)} ms" for total in table["total"]]
        xlabel = "share of the kernel time in a step (%)"
        stacked(ax, bars, COLOURS, text=sums, xlabel=xlabel, least=0.08, room=0.2)
        ax.set_title(model, loc="left")
    axes[0].set_xlabel("")
    traces.legend(figure, COLOURS, columns=2)

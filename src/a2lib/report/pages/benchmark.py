"""A training step: its MFU, least time and traced kernels, and what first steps cost."""

import numpy as np
import pandas as pd

from a2lib.report.metrics import ceilings, copy_bandwidth, floors, stated_peak
from a2lib.report.page import one, pick
from a2lib.report.plots import stacked
from a2lib.report.style import COLOURS, PAPER, chart
from a2lib.report.traces import legend
from a2lib.report.units import count, ms, percent
from a2lib.shapes import SIZES
from a2lib.theory.step_floor import eager_step, fused_step
from a2lib.theory.transformer import forward_flops, step_flops

# What the book calls the handouts' sizes: xl of 2025, and 2.7B, by their parameters.
TITLES = {name: name for name in SIZES if name != "8B"} | {"xl25": "2.0B", "2.7B": "3.4B"}
PLAIN = {"precision": "fp32", "attention": "eager", "compile": "none"}
TF32 = {**PLAIN, "precision": "tf32"}
BF16 = {**PLAIN, "precision": "bf16"}
COMPILED = {**BF16, "compile": "blocks"}
FAST = {"precision": "bf16", "attention": "flash", "compile": "blocks"}
PEER = {**FAST, "attention": "sdpa_flash"}
NARROW = {**FAST, "precision": "bf16_weights"}
# A change -> the configuration it leads to, whether that runs in a CUDA graph, and its mode.
LADDER = {
    "fp32": (PLAIN, False, "train-step"),
    "TF32": (TF32, False, "train-step"),
    "bf16": (BF16, False, "train-step"),
    "+ Flash, compiled": (FAST, False, "train-step"),
    "+ CUDA graph": (FAST, True, "train-step"),
    "+ a2lib's AdamW": (FAST, True, "master-step"),
    "+ 16-bit weights": (NARROW, True, "train-step"),
}
STEP = {"mode": "train-step", "phase": "wall", "warmup": 5}
WAY = ["precision", "attention", "compile"]
CASE = ["model", "context", "batch", "mode", *WAY, "warmup"]
PHASES = ("forward", "backward", "optimizer")


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each row what counting and other rows of the same step say.

    mfu: of a whole step: FLOPs over its time and the bf16 peak of the data sheet
    ms_gpu: the same step in a CUDA graph
    """
    rows = rows.copy()
    whole = rows["phase"] == "wall"
    rows["mfu"] = model_flops_utilization(rows, rows["ms"]).where(whole)
    replayed = rows[rows["capture"] & whole].set_index(CASE)["ms"].rename("ms_gpu")
    rows = rows.join(replayed, on=CASE)
    return rows.sort_values(["model", "context"], key=by_title)


def by_title(column: pd.Series) -> pd.Series:
    """Return what a column is sorted by: models in the order of TITLES."""
    if column.name != "model":
        return column
    return column.map(pd.Series(range(len(TITLES)), list(TITLES)))


def model_flops_utilization(rows: pd.DataFrame, times: pd.Series) -> pd.Series:
    """Return the MFU of each row: its model FLOPs over its time (ms) and over the bf16 peak of the
    device's data sheet; NaN where that is not noted."""
    cases = zip(rows["model"], rows["batch"], rows["context"], rows["mode"], strict=True)
    flops = pd.Series([_model_flops(*case) for case in cases], rows.index)
    return flops / times / 1e9 / stated_peak(rows["device"].iloc[0])


def _model_flops(model: str, batch: int, context: int, mode: str) -> float:
    """Return the model FLOPs of what a row times; NaN for a model that is not one of SIZES."""
    if model not in SIZES:
        return np.nan
    flops_of = forward_flops if mode == "forward" else step_flops
    return flops_of(SIZES[model], int(batch), int(context))


def least(
    ceiling: pd.DataFrame,
    model: str,
    precision: str,
    context: int = 512,
    batch: int = 4,
    fused: bool = True,
) -> dict:
    """Return the ``floors`` of a step by the best measured rates; {} without these."""
    kernels_of = fused_step if fused else eager_step
    kernels = kernels_of(SIZES[model], batch, context, precision)
    return floors(kernels, ceilings(ceiling), copy_bandwidth(ceiling), precision)


def step(
    rows: pd.DataFrame,
    model: str,
    configuration: dict,
    capture: bool = False,
    context: int = 512,
    mode: str = "train-step",
):
    """Return the row of a whole step, in a CUDA graph (``capture``) or launched from Python."""
    case = {"model": model, "context": context, "capture": capture, **STEP, "mode": mode}
    return one(rows, **case, **configuration)


def ladder_steps(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return a line for each of LADDER, by its name: GPU time, what launching from Python adds to
    it, and MFU.

    A change keeps all of those above it, except that bf16 takes the place of TF32.
    """
    lines = {}
    for name, (configuration, capture, mode) in LADDER.items():
        row = step(rows, model, configuration, capture, mode=mode)
        gpu = min(row.ms_gpu, row.ms)
        lines[name] = (gpu, row.ms - gpu, row.ms, row.mfu)
    columns = ["ms_gpu", "more", "ms", "mfu"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns)


LADDER_PARTS = {"GPU time": COLOURS[1], "waiting for Python": "#808080"}


@chart(height=3.4)
def ladder(figure, rows: pd.DataFrame, *models: str):
    """Draw LADDER for each model side by side: GPU time, and what launching from Python adds; at
    the end the step's time and its MFU. A first bar that leaves no room for the others is cut, with
    a break."""
    axes = figure.subplots(1, len(models), squeeze=False)[0]
    for ax, model in zip(axes, models, strict=True):
        steps = ladder_steps(rows, model)
        parts = steps[["ms_gpu", "more"]].set_axis(list(LADDER_PARTS), axis=1)
        words = [f"{ms(row.ms)}, {percent(row.mfu)}" for row in steps.itertuples()]
        stacked(ax, parts, LADDER_PARTS, text=words, numbers=False, xlabel="a step, ms")
        longest = steps["ms"].iloc[1:].max()
        limit = 2.25 * longest
        if steps["ms"].iloc[0] > limit:
            ax.texts[0].remove()
            ax.annotate(words[0], (0.97 * limit, 0), color=PAPER, ha="right", va="center")
            ax.plot([0.23 * limit, 0.2 * limit], [0.4, -0.4], color=PAPER, linewidth=5)
        ax.set_xlim(0, limit)
        ticks = ax.get_xticks()
        ticks = ticks[ticks <= 1.1 * longest]
        ax.set_xticks(ticks if len(ticks) < 4 else ticks[::2])
        ax.set_title(TITLES[model], loc="left")
    for ax in axes[1:]:
        ax.set_yticklabels([])
    legend(figure, LADDER_PARTS, columns=2)


LINEAR, ELSE = "least: linear layers", "least: everything else"
ABOVE = "above the least"
WAITING = "waiting for Python"
LEAST_PARTS = {LINEAR: COLOURS[1], ELSE: COLOURS[3], ABOVE: COLOURS[0], WAITING: "#808080"}
PRECISIONS = {"fp32": PLAIN, "TF32": TF32, "bf16": BF16}
# A bf16 step -> its configuration, whether it runs in a CUDA graph, and whether it is fused.
BF16_STEPS = {
    "bf16": (BF16, False, False),
    "+ Flash, compiled": (FAST, False, True),
    "PyTorch's Flash": (PEER, False, True),
    "+ CUDA graph": (FAST, True, True),
    "PyTorch's, in a graph": (PEER, True, True),
    "+ 16-bit weights": (NARROW, True, True),
}


def least_and_above(rows: pd.DataFrame, ceiling: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return what a bf16 step's ms are, a line for each of BF16_STEPS: the least time of its linear
    layers and of everything else, what its GPU time is above that, and the wait for Python."""
    lines = {}
    for name, (configuration, capture, fused) in BF16_STEPS.items():
        row = step(rows, model, configuration, capture)
        limit = least(ceiling, model, configuration["precision"], fused=fused)
        linear, total = limit["products"].ms, limit["total"].ms
        gpu = min(row.ms_gpu, row.ms)
        lines[name] = (linear, total - linear, gpu - total, row.ms - gpu)
    return pd.DataFrame.from_dict(lines, orient="index", columns=list(LEAST_PARTS))


@chart(height=4.7)
def least_bars(figure, rows: pd.DataFrame, ceiling: pd.DataFrame, model: str):
    """Draw a step by precision, and below it, on a larger scale, what the bf16 steps' ms are; at
    the right each step's ms and MFU."""
    above, below = figure.subplots(2, 1, height_ratios=(len(PRECISIONS), len(BF16_STEPS)))
    plain = [step(rows, model, way) for way in PRECISIONS.values()]
    whole = pd.DataFrame({"step": [row.ms for row in plain]}, index=list(PRECISIONS))
    stacked(above, whole, {"step": COLOURS[2]}, numbers=False)
    _times_beside(above, plain)
    above.set_title("By precision", loc="left")
    parts = least_and_above(rows, ceiling, model)
    stacked(below, parts, LEAST_PARTS, numbers=False, xlabel="a step, ms")
    steps = [step(rows, model, way, capture) for way, capture, _ in BF16_STEPS.values()]
    _times_beside(below, steps)
    below.set_title("In bf16, on a larger scale", loc="left")
    legend(figure, LEAST_PARTS, columns=2)


def _times_beside(ax, steps) -> None:
    """Write ms and MFU of each step at the right of its bar, under a header."""
    longest = max(row.ms for row in steps)
    ticks = ax.get_xticks()
    ax.set_xticks(ticks[ticks <= longest])
    ax.set_xlim(0, 1.4 * longest)
    ax.grid(False)
    lines = [("ms", "MFU"), *((count(row.ms), percent(row.mfu)) for row in steps)]
    for y, texts in enumerate(lines, -1):
        for x, text in zip((0.86, 1.0), texts, strict=True):
            ax.text(x, y, text, transform=ax.get_yaxis_transform(), ha="right", va="center")


def firsts(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return a row per model, compile and preparation, in ms, by the median over processes:

    steady: a later step
    excess: how much longer a process's first step is than that
    """
    key = ["model", "compile", "prepared"]
    timed = rows[(rows["status"] == "ok") & rows["part"].isin(["first", "steady"])]
    wide = timed.pivot_table(index=[*key, "repeat"], columns="part", values="ms", observed=True)
    wide["excess"] = wide["first"] - wide["steady"]
    return wide.groupby(key)[["steady", "excess"]].median().reset_index()


def processes(steps, model: str) -> list[np.ndarray]:
    """Return every step (ms) of each fresh process of a model, warm-up included."""
    mine = pick(steps, model=model, context=512, phase="wall", status="ok")
    ordered = mine.sort_values("step_number").groupby("warmup")["ms"]
    return [times.to_numpy(float) for _, times in ordered]


def samples(steps, model: str, warmup: int) -> pd.Series:
    """Return the ten times (ms) whose mean is taken after so many steps of warm-up."""
    mine = pick(steps, model=model, context=512, phase="wall", status="ok", warmup=warmup)
    return mine.sort_values("step_number")["ms"][mine["step_number"].astype(int) >= warmup]

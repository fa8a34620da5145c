"""The last milliseconds: AdamW's kernel, weights in 16 bits, AdamW beside the backward."""

import pandas as pd

from a2lib.report import plots
from a2lib.report.page import one, pick
from a2lib.report.pages import benchmark
from a2lib.report.pages.benchmark import BF16, FAST, NARROW, least
from a2lib.report.style import COLOURS, Chart
from a2lib.report.units import ms, percent

FIRST, BARE, WIDE_OVERLAP = "PyTorch's AdamW", "no AdamW", "overlapped, fp32 weights"
# Each changes one thing in the step before it.
CHANGES = KERNEL, WEIGHTS, OVERLAP = "a2lib's AdamW", "16-bit weights", "AdamW overlapped"
LADDER = [FIRST, *CHANGES]
# A step -> its configuration and mode, in a CUDA graph.
STEPS = {
    FIRST: (FAST, "train-step"),
    KERNEL: (FAST, "master-step"),
    WEIGHTS: (NARROW, "train-step"),
    OVERLAP: (NARROW, "overlapped-step"),
    BARE: (NARROW, "forward-backward"),
    WIDE_OVERLAP: (FAST, "overlapped-step"),
}


def energy(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Add to each sustained step what its energy says.

    watts: mean power
    mfu: of the mean time
    step: its name in STEPS
    """
    rows = rows.copy()
    rows["watts"] = 1e3 * rows["joules"] / rows["ms_mean"]
    rows["mfu"] = benchmark.model_flops_utilization(rows, rows["ms_mean"])
    for name, (way, mode) in STEPS.items():
        same = (rows[["mode", *way]] == pd.Series({"mode": mode, **way})).all(axis=1)
        rows.loc[same, "step"] = name
    return rows


def burst(rows: pd.DataFrame, model: str) -> dict:
    """Return a model's ten steps in a CUDA graph, by name in STEPS; none is without AdamW."""
    steps = {}
    for name in (*LADDER, WIDE_OVERLAP):
        way, mode = STEPS[name]
        steps[name] = benchmark.step(rows, model, way, capture=True, mode=mode)
    return steps


def sustained(rows: pd.DataFrame, model: str) -> dict:
    """Return a model's sustained steps, by name in STEPS."""
    return {name: one(rows, model=model, step=name) for name in STEPS}


def savings(steps: dict, column: str) -> dict[str, float]:
    """Return what each of CHANGES takes off the step before it, in ms of a column."""
    saved = {}
    for before, after in zip(LADDER, CHANGES, strict=False):
        saved[after] = getattr(steps[before], column) - getattr(steps[after], column)
    return saved


def pytorchs_adamw(traces: pd.DataFrame, model: str) -> float:
    """Return the ms of PyTorch's fused AdamW in a model's traced step in bf16."""
    case = {"model": model, "context": 512, "mode": "train-step", "phase": "step", **BF16}
    return one(traces, profiler="torch", **case).adamw


def expected(traces: pd.DataFrame, ceiling: pd.DataFrame, model: str) -> dict[str, float]:
    """Return what each of CHANGES should take off a step by its bytes, in ms."""
    wide, narrow = (least(ceiling, model, precision) for precision in ("bf16", "bf16_weights"))
    adamw = wide["optimizer"].ms
    return {
        KERNEL: pytorchs_adamw(traces, model) - adamw,
        WEIGHTS: wide["total"].ms - narrow["total"].ms,
        OVERLAP: adamw,
    }


def ladder(rows: pd.DataFrame, model: str) -> Chart:
    """Draw the sustained steps of a model's LADDER, and the one without AdamW, with their MFU."""
    names = [*LADDER, BARE]
    shown = pick(rows, model=model, step=names).set_index("step").loc[names]
    words = [f"{ms(row.ms_mean, 3)}, {percent(row.mfu)}" for row in shown.itertuples()]
    times = shown[["ms_mean"]].set_axis(["step"], axis=1)
    xlabel = "a step, ms"
    colours = {"step": COLOURS[1]}
    return plots.stacks(times, colours, 2.5, text=words, numbers=False, xlabel=xlabel, room=0.45)

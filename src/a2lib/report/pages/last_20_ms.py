"""The last milliseconds of a step: weights in 16 bits, AdamW beside the backward, power."""

import pandas as pd

from a2lib.report import plots
from a2lib.report.page import pick
from a2lib.report.pages import benchmark
from a2lib.report.pages.benchmark import FAST, NARROW
from a2lib.report.style import COLOURS, Chart
from a2lib.report.units import ms, percent

# A sustained step's name -> its configuration and mode, in a CUDA graph.
STEPS = {
    "fp32, PyTorch's AdamW": (FAST, "train-step"),
    "16-bit, a2lib's AdamW": (NARROW, "train-step"),
    "16-bit, AdamW overlapped": (NARROW, "overlapped-step"),
    "16-bit, no AdamW": (NARROW, "forward-backward"),
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


def captured(rows: pd.DataFrame, model: str, way: dict, mode: str = "train-step"):
    """Return the row of ten steps of 512 tokens in a CUDA graph."""
    return benchmark.step(rows, model, way, capture=True, mode=mode)


def steps(rows: pd.DataFrame, model: str) -> Chart:
    """Draw the sustained step of a model in each of STEPS, with its MFU."""
    shown = pick(rows, model=model, step=list(STEPS)).set_index("step").loc[list(STEPS)]
    words = [f"{ms(row.ms_mean, 3)}, {percent(row.mfu)}" for row in shown.itertuples()]
    times = shown[["ms_mean"]].set_axis(["step"], axis=1)
    xlabel = "a step, ms"
    colours = {"step": COLOURS[1]}
    return plots.stacks(times, colours, 2.2, text=words, numbers=False, xlabel=xlabel, room=0.45)

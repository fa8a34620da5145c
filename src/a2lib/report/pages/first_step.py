"""First steps of a process: how much longer they are than later ones, and what they pay for."""

import numpy as np
import pandas as pd

from a2lib.report import plots
from a2lib.report.page import one, pick
from a2lib.report.pages.benchmark import PHASES, TITLES, spread
from a2lib.report.style import COLOURS, chart
from a2lib.report.units import ms

# What a process prepares before its first step -> what that saves the step, beyond the line before.
SAVED = {"product": "cuBLAS", "block": "kernels, autograd", "memory": "allocator"}


def firsts(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return a row per model, compile and preparation: medians over its processes, in ms.

    ms_context: making the CUDA context, before the model is there
    first, steady: the first step, and a later one
    excess: first - steady
    apart: the largest excess of a process less the smallest
    processes: how many there are
    """
    key = ["model", "compile", "prepared"]
    timed = rows[(rows["status"] == "ok") & rows["part"].isin(["context", "first", "steady"])]
    wide = timed.pivot_table(index=[*key, "repeat"], columns="part", values="ms", observed=True)
    wide = wide.reindex(columns=["context", "first", "steady"])
    wide["excess"] = wide["first"] - wide["steady"]
    medians = wide.groupby(key).median()
    excess = wide.groupby(key)["excess"]
    medians["apart"] = excess.max() - excess.min()
    medians["processes"] = wide.groupby(key).size()
    return medians.reset_index().rename(columns={"context": "ms_context"})


def parts(rows: pd.DataFrame, model: str) -> dict[str, float]:
    """Return what each preparation saves an uncompiled model's first step, and the rest (ms)."""
    left = one(rows, model=model, compile="none", prepared="nothing").excess
    saved = {}
    for prepared, name in SAVED.items():
        after = one(rows, model=model, compile="none", prepared=prepared).excess
        saved[name], left = left - after, after
    return {**saved, "rest": left}


@chart(height=1.9)
def first_steps(figure, rows: pd.DataFrame, *models: str):
    """Draw what a first step takes more than a steady one, by what it pays for."""
    table = pd.DataFrame({TITLES[m]: parts(rows, m) for m in models}).T.clip(lower=0)
    shades = dict(zip(table.columns, [COLOURS[i] for i in (1, 0, 2, 4)], strict=True))
    text = [ms(t) for t in table.sum(axis=1)]
    words = "ms more than a steady step"
    plots.stacked(figure.subplots(), table, shades, text=text, xlabel=words)
    narrow = {"columnspacing": 1.0, "handlelength": 1.0}
    figure.legend(loc="outside upper left", ncols=4, frameon=False, **narrow)


def processes(steps, model: str, phase: str = "wall", context: int = 512) -> list[np.ndarray]:
    """Return every step (ms) of each fresh process of a model, warm-up included."""
    mine = pick(steps, model=model, context=context, phase=phase, status="ok")
    ordered = mine.sort_values("step_number").groupby("warmup")["ms"]
    return [times.to_numpy(float) for _, times in ordered]


def samples(steps, model: str, warmup: int, phase: str = "wall", context: int = 512) -> pd.Series:
    """Return the ten times (ms) whose mean is taken after so many steps of warm-up."""
    mine = pick(steps, model=model, context=context, phase=phase, status="ok", warmup=warmup)
    return mine.sort_values("step_number")["ms"][mine["step_number"].astype(int) >= warmup]


def warmups(steps: pd.DataFrame) -> pd.DataFrame:
    """Return mean and deviation of ten steps at 512 tokens, by steps of warm-up."""
    lines = []
    for model in [m for m in TITLES if (steps["model"] == m).any()]:
        for warmup in (0, 1, 2, 3, 5):
            ten = [samples(steps, model, warmup, p) for p in (*PHASES, "wall")]
            lines.append([TITLES[model], warmup, *(spread(s.mean(), s.std()) for s in ten)])
    return pd.DataFrame(lines, columns=["model", "warm-up", *PHASES, "train-step"])

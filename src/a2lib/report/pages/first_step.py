"""First steps of a process: how much longer they are than later ones, and what they pay for."""

import numpy as np
import pandas as pd

from a2lib.report.page import pick
from a2lib.report.pages.benchmark import PHASES, TITLES, spread


def firsts(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return a row per model, compile and preparation with ``excess``: how much longer a process's
    first step is than a later one, in ms; the median over processes."""
    key = ["model", "compile", "prepared"]
    timed = rows[(rows["status"] == "ok") & rows["part"].isin(["first", "steady"])]
    wide = timed.pivot_table(index=[*key, "repeat"], columns="part", values="ms", observed=True)
    excess = (wide["first"] - wide["steady"]).groupby(key).median()
    return excess.rename("excess").reset_index()


def processes(steps, model: str, phase: str = "wall") -> list[np.ndarray]:
    """Return every step (ms) of each fresh process of a model, warm-up included."""
    mine = pick(steps, model=model, context=512, phase=phase, status="ok")
    ordered = mine.sort_values("step_number").groupby("warmup")["ms"]
    return [times.to_numpy(float) for _, times in ordered]


def samples(steps, model: str, warmup: int, phase: str = "wall") -> pd.Series:
    """Return the ten times (ms) whose mean is taken after so many steps of warm-up."""
    mine = pick(steps, model=model, context=512, phase=phase, status="ok", warmup=warmup)
    return mine.sort_values("step_number")["ms"][mine["step_number"].astype(int) >= warmup]


def warmups(steps: pd.DataFrame) -> pd.DataFrame:
    """Return mean and deviation of ten steps at 512 tokens, by steps of warm-up."""
    measured = set(steps["model"])
    lines = []
    for model, title in TITLES.items():
        if model not in measured:
            continue
        for warmup in (0, 1, 2, 3, 5):
            line = [title, warmup]
            for phase in (*PHASES, "wall"):
                ten = samples(steps, model, warmup, phase)
                line.append(spread(ten.mean(), ten.std()))
            lines.append(line)
    return pd.DataFrame(lines, columns=["model", "warm-up", *PHASES, "train-step"])

"""AdamW, power and first steps: what a step takes beside its matrix multiplies."""

import numpy as np
import pandas as pd

from a2lib.report import plots
from a2lib.report.page import one, pick
from a2lib.report.pages import benchmark
from a2lib.report.pages.benchmark import FAST, NARROW, PHASES, TITLES, by_title, spread
from a2lib.report.style import COLOURS, chart
from a2lib.report.units import digits, ms, percent, span

# What a step is called -> its way and mode, captured.
STEPS = {
    "fp32 weights": (FAST, "train-step"),
    "16-bit weights": (NARROW, "train-step"),
    "AdamW overlapped": (NARROW, "overlapped-step"),
    "no AdamW": (NARROW, "forward-backward"),
}
# What a process prepares before its first step -> what that spares the step, beyond the one before.
SPARED = {"product": "cuBLAS", "block": "kernels, autograd", "memory": "allocator"}


def energy(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The rows with ``watts``, mean power; ``ms_limit``, the time of the energy at the power limit;
    ``mfu`` of the mean time; ``step``, its name in STEPS."""
    rows = rows.copy()
    rows["watts"] = 1e3 * rows["joules"] / rows["ms_mean"]
    rows["ms_limit"] = 1e3 * rows["joules"] / rows["power_limit_w"]
    rows["mfu"] = benchmark.model_flops_utilisation(rows, rows["ms_mean"])
    for name, (way, mode) in STEPS.items():
        same = (rows[["mode", *way]] == pd.Series({"mode": mode, **way})).all(axis=1)
        rows.loc[same, "step"] = name
    return rows


def firsts(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """A row per model, compile and preparation, of medians over its ``processes`` (ms): the
    context's ``ms_context``, ``first`` and ``steady``; ``excess``, the first less the steady, and
    its range ``apart``."""
    key = ["model", "compile", "prepared"]
    timed = rows[(rows["status"] == "ok") & rows["part"].isin(["context", "first", "steady"])]
    wide = timed.pivot_table(index=[*key, "repeat"], columns="part", values="ms", observed=True)
    wide = wide.reindex(columns=["context", "first", "steady"])
    wide["excess"] = wide["first"] - wide["steady"]
    found = wide.groupby(key).median()
    found["apart"] = wide.groupby(key)["excess"].agg(lambda s: s.max() - s.min())
    found["processes"] = wide.groupby(key).size()
    return found.reset_index().rename(columns={"context": "ms_context"})


def parts(rows: pd.DataFrame, model: str) -> dict[str, float]:
    """What each preparation spares the first step of a model, and the rest (ms)."""
    left = one(rows, model=model, compile="none", prepared="nothing").excess
    found = {}
    for prepared, name in SPARED.items():
        after = one(rows, model=model, compile="none", prepared=prepared).excess
        found[name], left = left - after, after
    return {**found, "rest": left}


@chart(height=2.2)
def steps(figure, rows: pd.DataFrame, model: str):
    """The sustained step of a model in each of STEPS, with its share of peak, energy and clock."""
    found = [one(rows, model=model, step=name) for name in STEPS]
    text = [
        f"{ms(r.ms_mean, 3)}, {percent(r.mfu)}, {digits(r.joules, 3)} J, {r.sm_mhz:,.0f} MHz"
        for r in found
    ]
    ax = figure.subplots()
    shades = [COLOURS[1], COLOURS[0], COLOURS[0], COLOURS[4]]
    times = [r.ms_mean for r in found]
    plots.bars(ax, list(STEPS), times, text=text, colours=shades, xlabel="a step, ms")
    ax.set_xlim(0, 3.1 * max(times))
    ax.set_xticks([0, 50, 100])
    ax.grid(False)  # the text crosses it


@chart(height=2.5)
def streams(figure):
    """The backward and AdamW on two streams: one after the other, and overlapped."""
    cases = {"AdamW after the backward": False, "AdamW overlapped, on paper": True}
    for ax, (title, beside) in zip(figure.subplots(2, 1, sharex=True), cases.items(), strict=True):
        ax.broken_barh([(i, 0.94) for i in range(8)], (1.1, 0.8), color=COLOURS[1])
        updates = [(i + 1 if beside else 8 + 0.5 * i, 0.47) for i in range(8)]
        ax.broken_barh(updates, (0, 0.8), color=COLOURS[0])
        plots.name_lanes(ax, [0.4, 1.5], ["AdamW (bytes)", "backward (multiplies)"])
        ax.set_title(title, loc="left")
        ax.set(xlim=(0, 12.5), xticks=[])
    ax.set_xlabel("time")


@chart(height=1.9)
def first_steps(figure, rows: pd.DataFrame, *models: str):
    """What a first step takes beyond a steady one, by what it pays for."""
    table = pd.DataFrame({TITLES[m]: parts(rows, m) for m in models}).T.clip(lower=0)
    shades = dict(zip(table.columns, [COLOURS[i] for i in (1, 0, 2, 4)], strict=True))
    text = [ms(t) for t in table.sum(axis=1)]
    plots.stacked(figure.subplots(), table, shades, text=text, xlabel="ms beyond a steady step")
    narrow = {"columnspacing": 1.0, "handlelength": 1.0}
    figure.legend(loc="outside upper left", ncols=4, frameon=False, **narrow)


@chart(height=2.6)
def process(figure, rows: pd.DataFrame, *models: str):
    """The steps of a model's fresh processes from the second on, over the median of those from the
    fourth on; what the first takes stands above."""
    axes = figure.subplots(1, len(models), sharey=True)
    for ax, model in zip(axes, models, strict=True):
        ratios = [one / np.median(one[3:]) for one in processes(rows, model)]
        for ratio in ratios:
            ax.plot(range(2, len(ratio) + 1), ratio[1:], color=COLOURS[0], linewidth=1, alpha=0.6)
        firsts = [ratio[0] for ratio in ratios]
        ax.set_title(f"{TITLES[model]}\nfirst: {span(firsts, digits)}", loc="left")
        ax.set(xlabel="step", xticks=[2, 5, 10, 15])
    axes[0].set(ylabel="over the median", ylim=(0.88, 1.25))


def by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Time, share of peak, energy, power and clock of each sustained step."""
    rows = rows.fillna({"step": "PyTorch's attention, fp32 weights"})
    rows = rows.sort_values(["model", "ms_mean"], ascending=[True, False], key=by_title)
    cells = [
        [TITLES[r.model], r.step, digits(r.ms_mean, 3), percent(r.mfu), digits(r.joules, 3)]
        + [f"{r.watts:.0f}", digits(r.ms_limit, 3), f"{r.sm_mhz:,.0f}"]
        for r in rows.itertuples()
    ]
    columns = ["model", "step", "ms", "of peak", "J", "W", "ms at the limit", "MHz"]
    return pd.DataFrame(cells, columns=columns)


def processes(steps, model: str, phase: str = "wall", context: int = 512) -> list[np.ndarray]:
    """Every step (ms) of each fresh process of a model, warm-up included."""
    mine = pick(steps, model=model, context=context, phase=phase, status="ok")
    ordered = mine.sort_values("step_number").groupby("warmup")["ms"]
    return [times.to_numpy(float) for _, times in ordered]


def samples(steps, model: str, warmup: int, phase: str = "wall", context: int = 512) -> pd.Series:
    """The ten times (ms) that a mean after so many steps of warm-up is taken of."""
    mine = pick(steps, model=model, context=context, phase=phase, status="ok", warmup=warmup)
    return mine.sort_values("step_number")["ms"][mine["step_number"].astype(int) >= warmup]


def warmups(steps: pd.DataFrame) -> pd.DataFrame:
    """Mean and deviation of ten steps at 512 tokens by steps of warm-up."""
    lines = []
    for model in [m for m in TITLES if (steps["model"] == m).any()]:
        for warmup in (0, 1, 2, 3, 5):
            found = [samples(steps, model, warmup, p) for p in (*PHASES, "wall")]
            lines.append([TITLES[model], warmup, *(spread(s.mean(), s.std()) for s in found)])
    return pd.DataFrame(lines, columns=["model", "warm-up", *PHASES, "train-step"])

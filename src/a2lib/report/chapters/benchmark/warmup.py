"""Warm-up: what a mean is without it, step by step."""

from __future__ import annotations

import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator

from a2lib.report import panels, style
from a2lib.report.chapters.benchmark.rows import MODELS, TITLES, Benchmark, half
from a2lib.report.chapters.measured import reason, spread
from a2lib.report.metrics import pick
from a2lib.report.style import Chart, listed
from a2lib.report.tables import Markdown, Table

WARMUPS = (0, 1, 2, 5)
PROCESSES = (0, 5)  # the numbers of warm-up steps that have a process of their own
AVERAGED = 10
TRAINED = tuple(model for model in MODELS if model != "10B")  # whose step fits
STEADY = 5  # the last steps of a process are taken for its steady ones
NEAR = 0.02  # a mean this near to that after five steps of warm-up agrees with it
CONTEXT = 128  # of all of these


def samples(b: Benchmark, model: str, warmup: int, phase: str) -> list[float]:
    """What a mean after so many steps of warm-up is taken of, in ms: the measured steps of the
    process with that warm-up, or where there is none the same steps of the longest, which until
    then has done the same."""
    rows = pick(b.steps, model=model, phase=phase, status="ok")
    mine = pick(rows, warmup=warmup)
    if not len(mine) and warmup not in PROCESSES:
        mine = pick(rows, warmup=PROCESSES[-1])
    first = mine["step_number"].astype(int) - warmup
    return list(mine[(first >= 0) & (first < AVERAGED)]["ms"].astype(float))


def table(b: Benchmark, caption: str, name: str) -> Table:
    """What n = 10 steps after each warm-up give as mean and deviation."""
    lines = []
    for model in MODELS:
        for warmup in WARMUPS:
            found = [samples(b, model, warmup, p)
                     for p in ("forward", "backward", "optimizer", "wall")]  # fmt: skip
            if any(found):
                lines.append([TITLES[model], warmup, *map(_mean, found)])
    columns = ["model", "w", "forward", "backward", "optimizer", "train-step"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def sentence(b: Benchmark) -> Markdown:
    """How much longer the first step takes, and which means agree with those after five steps."""
    firsts, agree = {}, {w: [] for w in WARMUPS[:-1]}
    for model in MODELS:
        cold = samples(b, model, 0, "wall")
        warm = samples(b, model, WARMUPS[-1], "wall")
        if len(cold) > STEADY:
            firsts[model] = cold[0] / float(pd.Series(cold[-STEADY:]).median())
        for warmup in agree:
            mine = samples(b, model, warmup, "wall")
            if mine and warm:
                agree[warmup].append(abs(_average(mine) / _average(warm) - 1) <= NEAR)
    if not firsts:
        return Markdown(b.not_yet("what steps without warm-up cost"))
    low, high = min(firsts, key=firsts.get), max(firsts, key=firsts.get)
    ends = [f"{firsts[model]:.1f} ({TITLES[model]})" for model in dict.fromkeys((low, high))]
    text = (
        f"The first step of a process takes {' to '.join(ends)} times the median of its last "
        f"{STEADY}."
    )
    told = [f"{sum(known)} of {len(known)} models after {warmup}"
            for warmup, known in agree.items() if known]  # fmt: skip
    if told:
        text += f" The mean is within {NEAR:.0%} of that after five steps of warm-up for " + (
            f"{listed(told)} {'step' if len(told) == 1 else 'steps'}."
        )
    walls = pick(b.steps, phase="wall")
    return Markdown(text + _second(b) + _held(b) + half(walls, "steps"))


def _whole(b: Benchmark, phase: str = "wall") -> dict[tuple[str, int], list[float]]:
    """(model, steps of warm-up) -> every step of the process, in ms, if there are some after the
    second."""
    rows = pick(b.steps, phase=phase, status="ok")
    found = {key: list(mine.sort_values("step_number")["ms"].astype(float))
             for key, mine in rows.groupby(["model", "warmup"], sort=False)}  # fmt: skip
    return {key: ms for key, ms in found.items() if len(ms) > STEADY}


def _second(b: Benchmark) -> str:
    """Where the first step's excess is, and whether the second has any."""
    walls, forwards, shares, seconds = _whole(b), _whole(b, "forward"), [], {}
    for (model, warmup), ms in walls.items():
        later = float(pd.Series(ms[2:]).median())
        seconds.setdefault(model, []).append(ms[1] / later)
        if (model, warmup) in forwards:
            first, *_ = forward = forwards[model, warmup]
            shares.append((first - float(pd.Series(forward[2:]).median())) / (ms[0] - later))
    text = ""
    if shares:
        share = style.between(shares, style.share)
        text += f" Of what the first step takes more the forward has {share}."
    slower = [m for m, ratios in seconds.items() if min(ratios) > 1 + NEAR]
    once = [m for m, ratios in seconds.items() if min(ratios) <= 1 + NEAR < max(ratios)]
    every = [ratio for ratios in seconds.values() for ratio in ratios]
    if every and not slower:
        text += (
            f" The second step takes {style.between(every, '{:.2f}'.format)} times the median of "
            f"the later ones of its process, and for no model is it more than {NEAR:.0%} longer "
            f"in each process{_once(once)}: one step of warm-up is enough."
        )
    elif every:
        text += (
            " The second step is still longer than the median of the later ones, in each process, "
            f"for {listed([TITLES[m] for m in slower])}."
        )
    return text


def _once(models: list[str]) -> str:
    return f" (in one alone for {listed([TITLES[m] for m in models])})" if models else ""


def _held(b: Benchmark) -> str:
    """That means differ by more than warm-up does where the host holds the step up."""
    spreads: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for model in MODELS:
        warm = pd.Series(samples(b, model, WARMUPS[-1], "wall"), dtype="float64")
        host, gpu = b.host(model, CONTEXT), b.ms(model, CONTEXT, "step", capture=True)
        if len(warm) > 1 and host and gpu:
            spreads[host > gpu][TITLES[model]] = float(warm.std() / warm.mean())
    if not all(spreads.values()):
        return ""
    told = [f"{style.between(found.values(), '{:.1%}'.format)} for {listed(list(found))}"
            for found in spreads.values()]  # fmt: skip
    return (
        f" What is left is not warm-up: after five steps the standard deviation is {told[0]}, "
        f"whose steps the host holds up at {CONTEXT} tokens, and {told[1]}, whose steps it does "
        "not."
    )


def missing(b: Benchmark) -> Markdown:
    """The processes of both sweeps that gave no times, each with its reason, and those that nobody
    has run yet."""
    told, left = [], []
    for model in TRAINED:
        for warmup in PROCESSES:
            rows = pick(b.steps, model=model, warmup=warmup)
            name = f"{TITLES[model]} after {warmup}"
            if not len(rows):
                left.append(name)
            elif not (rows["status"] == "ok").any():
                told.append(f"- {name}: {_why(rows)}")
    firsts = pick(b.firsts, part="first")
    for (model, compile_, prepared), rows in firsts.groupby(["model", "compile", "prepared"]):
        failed = rows[rows["status"] != "ok"]
        if len(failed):
            how = ", compiled," if compile_ != "none" else ""
            some = f" ({len(failed)} of {len(rows)} processes)" if len(rows) > 1 else ""
            told.append(f"- first step of {TITLES.get(model, model)}{how} after `{prepared}`"
                        f"{some}: {_why(failed)}")  # fmt: skip
    if not len(b.steps):
        return Markdown(b.not_yet("steps without warm-up, and after some"))
    if left:
        told.append(f"\n**Not measured yet**, of the processes: {listed(left)} steps of warm-up.")
    return Markdown("\n".join(told) or "Every process that was run gave its times.")


def _why(rows: pd.DataFrame) -> str:
    row = next(rows.itertuples())
    return f"{style.STATUS.get(row.status, row.status)} ({reason(row.note)})"


def chart(b: Benchmark) -> Chart:
    """Above, the wall time of each step of a process against its number, a line for each process;
    below, what is averaged after each warm-up (``samples``): a point for each step, over the median
    of those after five steps of warm-up."""
    import seaborn  # a second to import, for this figure alone

    rows = pick(b.steps, phase="wall", status="ok")
    models = [m for m in MODELS if (rows["model"] == m).any()]
    if not models:
        return panels.empty()
    looks = {TITLES[model]: look for model, look in style.palette(models).items()}
    numbers = {"step_number": rows["step_number"].astype(int), "ms": rows["ms"].astype(float)}
    rows = rows.assign(**numbers, title=rows["model"].map(TITLES))
    steady = pick(rows, warmup=WARMUPS[-1])
    steady = steady[steady["step_number"] >= WARMUPS[-1]].groupby("title")["ms"].median()
    averaged = pd.DataFrame(
        [(TITLES[model], w, ms) for model in models for w in WARMUPS
         for ms in samples(b, model, w, "wall")], columns=["title", "warmup", "ms"],
    )  # fmt: skip
    averaged = averaged.assign(ratio=averaged["ms"] / averaged["title"].map(steady))
    averaged = averaged.dropna(subset=["ratio"])
    named = {"hue": "title", "hue_order": list(looks),
             "palette": {title: look.colour for title, look in looks.items()}}  # fmt: skip
    marks = {title: look.marker for title, look in looks.items()}

    def draw(figure):
        above, below = figure.subplots(2, 1)
        seaborn.lineplot(rows, x="step_number", y="ms", style="title", units="warmup", **named,
                         estimator=None, dashes=False, markers=marks, markersize=4, linewidth=1.2,
                         markeredgewidth=0, ax=above)  # fmt: skip
        above.set_xlabel("step of a process, the first is 0")
        above.set_ylabel("wall time (ms)")
        panels.legend(figure, above.get_legend_handles_labels()[0], columns=3)
        above.get_legend().remove()
        below.set_xlabel("steps of warm-up")
        below.set_ylabel("time over the median after 5")
        if len(averaged):
            seaborn.stripplot(averaged, x="warmup", y="ratio", order=list(WARMUPS), **named,
                              dodge=True, jitter=False, size=4, legend=False, ax=below)  # fmt: skip
            below.axhline(1, **panels.REFERENCE_LINE, zorder=0)
        else:
            panels.nothing(below)
        for ax in (above, below):
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: panels.plain(value)))
            ax.minorticks_off()

    return Chart(draw, height=5.6 + panels.legend_height(len(models), 3))


def _average(values: list[float]) -> float:
    return sum(values) / len(values)


def _mean(values: list[float]) -> str:
    if not values:
        return "·"
    series = pd.Series(values, dtype="float64")
    return spread(float(series.mean()), float(series.std()))

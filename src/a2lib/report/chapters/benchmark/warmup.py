"""Warm-up: what a mean is without it, step by step, and the first step taken apart."""

from __future__ import annotations

import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator

from a2lib.report import panels, style
from a2lib.report.chapters.benchmark.rows import MODELS, TITLES, Benchmark
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
# What each preparation spares the first step, beside the one before it.
SPARED = (("product", "nothing", "cuBLAS"), ("block", "product", "kernels and autograd"),
          ("memory", "block", "allocator"))  # fmt: skip
LADDER = ("nothing", "product", "block", "memory", "modules")
# (model, what is compiled) -> the preparations whose first steps are measured.
PREPARED = {("small", "none"): LADDER, ("2.7B", "none"): LADDER,
            ("small", "blocks"): ("nothing", "cached")}  # fmt: skip


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
    return Markdown(text)


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
        if not (rows["status"] == "ok").any():
            how = ", compiled" if compile_ != "none" else ""
            told.append(f"- first step of {TITLES.get(model, model)}{how} after {prepared}: "
                        f"{_why(rows)}")  # fmt: skip
    if not len(b.steps):
        return Markdown(b.not_yet("steps without warm-up, and after some"))
    if left:
        told.append(f"\n**Not measured yet**, of the processes: {listed(left)} steps of warm-up.")
    return Markdown("\n".join(told) or "Every process gave its times.")


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


def part(b: Benchmark, model: str, prepared: str, name: str, compile_: str = "none"):
    """The median over the processes of a part, in ms, or None."""
    rows = pick(b.firsts, model=model, prepared=prepared, part=name, compile=compile_, status="ok")
    return float(rows["ms"].median()) if len(rows) else None


def excess(b: Benchmark, model: str, prepared: str, compile_: str = "none") -> float | None:
    """What the first step takes beyond a steady one of the same process, in ms."""
    first = part(b, model, prepared, "first", compile_)
    steady = part(b, model, prepared, "steady", compile_)
    return None if first is None or steady is None else first - steady


def firsts_table(b: Benchmark, caption: str, name: str) -> Table:
    """The first step's excess, and what each preparation takes from it."""
    lines = []
    for model in MODELS:
        for compile_ in ("none", "blocks"):
            whole = excess(b, model, "nothing", compile_)
            if whole is None:
                continue
            cells = [part(b, model, "nothing", "steady", compile_), whole]
            for prepared, before, _ in SPARED:
                cells.append(_less(excess(b, model, before, compile_),
                                   excess(b, model, prepared, compile_)))  # fmt: skip
            cells.append(excess(b, model, "memory", compile_))
            cells.append(_less(whole, excess(b, model, "modules", compile_)))
            cells.append(_less(whole, excess(b, model, "cached", compile_)))
            cells.append(part(b, model, "nothing", "context", compile_))
            title = TITLES[model] + (", compiled" if compile_ != "none" else "")
            lines.append([title, *("·" if c is None else _signed(c) for c in cells)])
    columns = ["model", "steady step", "first step: more", *(title for *_, title in SPARED), "rest",
               "lazy loading", "compiling", "context (before)"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def firsts_sentence(b: Benchmark) -> Markdown:
    """The largest part of each model's first step, and what compiling adds."""
    told = []
    for model in MODELS:
        whole = excess(b, model, "nothing")
        known = {title: _less(excess(b, model, before), excess(b, model, prepared))
                 for prepared, before, title in SPARED}  # fmt: skip
        known = {title: value for title, value in known.items() if value is not None}
        if whole and known:
            most = max(known, key=known.get)
            rank = "the largest part" if len(known) == len(SPARED) else "the largest part known"
            told.append(
                f"the first step of {TITLES[model]} takes {style.digits(whole)} ms more than a "
                f"steady one, of which {most} {style.digits(known[most])} ms, {rank}"
            )
        compiled = excess(b, model, "nothing", "blocks")
        spared = _less(compiled, excess(b, model, "cached", "blocks"))
        if spared is not None:
            told.append(
                f"with its blocks compiled that of {TITLES[model]} takes {_seconds(compiled)} s "
                f"more than a steady one, of which code on disk spares {_seconds(spared)} s"
            )
    if not told:
        return Markdown(b.not_yet("the parts of a first step"))
    text = "; ".join(told)
    return Markdown(f"{text[0].upper()}{text[1:]}.{_unprepared(b)}")


def _unprepared(b: Benchmark) -> str:
    """The preparations that nobody has run yet."""
    left = []
    for (model, compile_), every in PREPARED.items():
        rows = pick(b.firsts, model=model, compile=compile_, part="first")
        names = [f"`{name}`" for name in every if not (rows["prepared"] == name).any()]
        how = ", compiled" if compile_ != "none" else ""
        left += [f"{listed(names)} of {TITLES[model]}{how}"] if names else []
    return f" **Not measured yet**, of the preparations: {'; '.join(left)}." if left else ""


def _average(values: list[float]) -> float:
    return sum(values) / len(values)


def _mean(values: list[float]) -> str:
    if not values:
        return "·"
    series = pd.Series(values, dtype="float64")
    return spread(float(series.mean()), float(series.std()))


def _less(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else before - after


def _seconds(ms: float) -> str:
    return _signed(ms / 1e3)


def _signed(value: float) -> str:
    return ("−" if value < 0 else "") + style.digits(abs(value))

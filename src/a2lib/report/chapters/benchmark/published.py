"""Figures of other writeups of the assignment beside ours."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.estimate import BATCH, LARGEST
from a2lib.report.chapters.benchmark.rows import (
    CONTEXT,
    CONTEXTS,
    MODELS,
    PLAIN,
    TITLES,
    WARMUP,
    Benchmark,
)
from a2lib.report.chapters.benchmark.warmup import NEAR, samples
from a2lib.report.chapters.measured import spread
from a2lib.report.metrics import pick, row_of
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table
from a2lib.theory.transformer import SIZES, forward_flops, parameter_count

DEVICES = ("H800 PCIe", "unnamed GPU of 80 GB")
WARMED = "RTX 5090"
SMALL = "unnamed GPU of 16 to 24 GB"
STEPS = 10  # that each published mean is of
PHASES = ("forward", "backward")


def table(b: Benchmark, caption: str, name: str) -> Table:
    """Forward and backward as they were printed, beside ours."""
    lines = []
    for model in MODELS:
        for context in CONTEXTS:
            cells, published = [], False
            for phase in PHASES:
                for device in DEVICES:
                    row = row_of(b.reference, model=model, context=context, phase=phase,
                                 device=device, warmup=WARMUP)  # fmt: skip
                    published |= row is not None
                    cells.append(_printed(row))
                ours = b.phase(model, context, phase)
                cells.append("·" if ours is None else _printed(ours))
            if published:
                lines.append([TITLES[model], style.tokens(context), *cells])
    shown = ["H800 PCIe", "80 GB, unnamed", b.short]
    columns = ["model", "tokens", *(f"forward: {s}" if i == 0 else s for i, s in enumerate(shown)),
               *(f"backward: {s}" if i == 0 else f"{s} " for i, s in enumerate(shown))]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def warmups(b: Benchmark, caption: str, name: str) -> Table:
    """Forward by the number of warm-up steps, as printed for another GPU, beside ours."""
    rows = pick(b.reference, device=WARMED, phase="forward")
    lines = []
    for row in rows.itertuples():
        mine = pd.Series(samples(b, row.model, int(row.warmup), "forward"), dtype="float64")
        ours = spread(float(mine.mean()), float(mine.std())) if len(mine) else "·"
        lines.append([TITLES[row.model], int(row.warmup), _printed(row), ours])
    columns = ["model", "w", WARMED, b.short]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def sources(b: Benchmark) -> Markdown:
    """Where the published figures stand, and what they do not say."""
    found = b.reference.drop_duplicates(["device", "source"])
    told = "; ".join(f"{row.device}: {row.source}" for row in found.itertuples())
    return Markdown(
        f"Published: {told}. None says whether its products were in TF32, and figures by warm-up "
        "come without a context length."
    )


def rates(b: Benchmark) -> Markdown:
    """The published forwards as rates, beside ours with and without TF32."""
    told = []
    for device in DEVICES:
        rows = pick(b.reference, device=device, phase="forward", warmup=WARMUP, status="ok")
        best = max(_rate(r.model, r.context, r.ms) for r in rows.itertuples())
        told.append(f"{style.digits(best)} TFLOP/s on the {device}")
    ours = {p: b.ms(LARGEST, CONTEXT, "forward", way={**PLAIN, "precision": p})
            for p in ("fp32", "tf32")}  # fmt: skip
    text = f"The arithmetic tells: the fastest of their forwards run at {listed(told)}."
    if not all(ours.values()):
        return Markdown(f"{text} {b.not_yet('ours with and without TF32 beside them')}")
    fp32, tf32 = (_rate(LARGEST, CONTEXT, ours[p]) for p in ("fp32", "tf32"))
    return Markdown(
        f"{text} Ours, {TITLES[LARGEST]} at {CONTEXT} tokens, runs at {style.digits(fp32)} in fp32 "
        f"and at {style.digits(tf32)} in TF32. Our reading is that theirs are in plain fp32 too."
    )


def slow_steps(b: Benchmark) -> Markdown:
    """What a published mean and deviation without warm-up say of the first step."""
    one, several, excess, parameters = [], [], [], []
    for model in MODELS:
        cold, warm = (_row(b, WARMED, model, warmup) for warmup in (0, 2))
        if cold is None or warm is None:
            continue
        left, steady = _without_one(cold), _without_one(warm)
        words = f"{style.digits(left)} ms ({TITLES[model]}, {style.digits(steady)})"
        if abs(left / steady - 1) <= NEAR:
            one.append(words)
            excess.append(_excess(cold))
            parameters.append(parameter_count(SIZES[model]))
        else:
            several.append(words)
    noisy = max((_row(b, WARMED, m, 2) for m in MODELS if _row(b, WARMED, m, 2) is not None),
                key=lambda row: row.ms_std / row.ms)  # fmt: skip
    text = (
        f"One step of {STEPS} that takes x longer adds x / {STEPS} to their mean and gives a "
        f"deviation of x / √{STEPS}, so that both together tell what the others took. Without "
        f"warm-up that leaves, on the {WARMED}, {listed(one)}, in brackets the same after two "
        f"steps: within {NEAR:.0%}, so there a single step is slow. It takes "
        f"{style.digits(min(excess))} to {style.digits(max(excess))} ms more, for models one of "
        f"which has {max(parameters) / min(parameters):.1f} times the parameters of another: what "
        "is paid for is the process's, not the model's."
    )
    if several:
        text += f" It leaves {listed(several)}, too much: more than one step is slow."
    return Markdown(
        f"{text} Two steps of warm-up are not always enough: {TITLES[noisy.model]} has "
        f"{_printed(noisy)} ms after them, which one step of {style.digits(_excess(noisy))} ms "
        "more explains."
    )


def first_of_all(b: Benchmark) -> Markdown:
    """The small GPU's deviations without warm-up, and its slowest backward."""
    known = [row for model in MODELS if (row := _row(b, SMALL, model, 0)) is not None]
    first, others = known[0], known[1:]
    backward = {m: row for m in MODELS
                if (row := _row(b, SMALL, m, 0, "backward")) is not None}  # fmt: skip
    slow = max(backward, key=lambda m: backward[m].ms / _row(b, SMALL, m, 0).ms)
    ratio = backward[slow].ms / _row(b, SMALL, slow, 0).ms
    shares = [row.ms_std / row.ms for row in others]
    state = 8 * parameter_count(SIZES[slow]) / 1e9  # fp32 weights and their gradients
    return Markdown(
        f"The {SMALL} without warm-up has {_printed(first)} ms for {TITLES[first.model]}, its "
        f"first model, and deviations of {min(shares):.0%} to {max(shares):.0%} for the others: "
        "our reading is that all were timed in one process, so that the first model paid for "
        f"them all. Its backward of {TITLES[slow]} takes {style.digits(ratio)} times its forward. "
        f"Weights and gradients are {style.digits(state)} GB before anything is saved, about all "
        "that it has: that time is memory on its way to the host and back, we guess, not "
        "arithmetic."
    )


def _row(b: Benchmark, device: str, model: str, warmup: int, phase: str = "forward"):
    """A published row that has a time, or None."""
    row = row_of(b.reference, device=device, model=model, warmup=warmup, phase=phase)
    return row if row is not None and row.status == "ok" else None


def _excess(row) -> float:
    """What one step of STEPS must take beyond the others to give the deviation, in ms.

    The deviation is that of n - 1: x / n above the mean of n - 1 equal ones gives x / sqrt(n).
    """
    return float(row.ms_std) * math.sqrt(STEPS)


def _without_one(row) -> float:
    """The mean of the other steps, in ms."""
    return float(row.ms) - _excess(row) / STEPS


def _rate(model: str, context: float, ms: float) -> float:
    return forward_flops(SIZES[model], BATCH, int(context)) / ms / 1e9


def _printed(row) -> str:
    if row is None:
        return "·"
    if row.status != "ok":
        return style.STATUS.get(row.status, row.status)
    mean = row.ms if pd.isna(getattr(row, "ms_mean", float("nan"))) else row.ms_mean
    return spread(float(mean), float(row.ms_std))

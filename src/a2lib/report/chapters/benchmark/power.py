"""What the captured steps take of energy, and the least time that the power limit makes of it."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import CONTEXT, MODELS, OURS, PEER, TITLES, Benchmark
from a2lib.report.chapters.benchmark.speed import aimed
from a2lib.report.chapters.benchmark.updates import NARROW_WAY, OVERLAPPED
from a2lib.report.chapters.measured import time
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

ALONE, AFTER, BESIDE = "no update", "update after", "update beside"
# What a step is called, its way and its mode. The last three are one precision's.
STEPS = {
    "PyTorch's attention": (PEER, "train-step"),
    "ours": (OURS, "train-step"),
    ALONE: (NARROW_WAY, "forward-backward"),
    AFTER: (NARROW_WAY, "train-step"),
    BESIDE: (NARROW_WAY, OVERLAPPED),
}
NAMES = {step: f"16-bit: {step}" for step in (ALONE, AFTER, BESIDE)}
# From this share of the limit on it is power that a step waits for: the driver holds the clock
# low enough to stay below, and its counter moves in steps.
BOUND = 0.95


def found(b: Benchmark, model: str) -> dict[str, object]:
    """The captured rows of a model whose energy is known, by the name of the step."""
    rows = {}
    for name, (way, mode) in STEPS.items():
        where = {"model": model, "context": CONTEXT, "mode": mode, "capture": True, **way}
        mine = b.power[(b.power[list(where)] == pd.Series(where)).all(axis=1)]
        mine = mine[(mine["status"] == "ok") & mine["joules"].notna()]
        if len(mine):
            rows[name] = next(mine.itertuples())
    return rows


def watts(row) -> float:
    """The mean power of a step."""
    return 1000 * row.joules / row.ms_mean


def least(row) -> float:
    """The least time that a step can take which needs as much energy, in ms."""
    return 1000 * row.joules / row.power_limit_w


def table(b: Benchmark, caption: str, name: str) -> Table:
    """Time, energy, power and clock of each step, and its energy over the limit."""
    lines = []
    for model in MODELS:
        for step, row in found(b, model).items():
            known = pd.notna(row.power_limit_w)
            lines.append([
                TITLES[model], NAMES.get(step, step), time(row.ms_mean), style.digits(row.joules),
                f"{watts(row):.0f}", time(least(row)) if known else MISSING,
                MISSING if pd.isna(row.capped_percent) else f"{row.capped_percent:.0f}%",
                MISSING if pd.isna(row.sm_mhz) else f"{row.sm_mhz:.0f}",
            ])  # fmt: skip
    columns = ["model", "step", "ms", "J", "W", "at the limit, ms", "clock held", "MHz"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def sentence(b: Benchmark) -> Markdown:
    """Whether power binds the steps, and what that leaves of the overlap and of the targets."""
    every = {model: rows for model in MODELS if (rows := found(b, model))}
    rows = [row for of in every.values() for row in of.values() if pd.notna(row.power_limit_w)]
    if not rows:
        return Markdown(b.not_yet("what a step takes of energy"))
    shares = [watts(row) / row.power_limit_w for row in rows]
    limits, taken = (
        style.between(of, "{:.0f} W".format)
        for of in ([row.power_limit_w for row in rows], [watts(row) for row in rows])
    )
    who = "the step below takes" if len(rows) == 1 else f"the {len(rows)} steps below take"
    text = (
        f"Repeated for some seconds, {who} {taken}, where the driver allows {limits}: "
        f"{style.between(shares, '{:.0%}'.format)} of it"
    )
    held = [row.capped_percent for row in rows if pd.notna(row.capped_percent)]
    if held:
        text += (
            ", and by "
            f"{style.between(held, '{:.0f}%'.format)} of its readings it keeps the clock low for "
            "that"
        )
    text += "."
    if min(shares) < BOUND:
        free = [
            f"{TITLES[model]}, {NAMES.get(step, step)}"
            for model, of in every.items()
            for step, row in of.items()
            if pd.notna(row.power_limit_w) and watts(row) / row.power_limit_w < BOUND
        ]
        return Markdown(f"{text} Not all wait for power: {listed(free)} could take more.")
    text += (
        " So power is what they wait for: the clock falls until a step takes as long as its energy "
        "over the limit, whatever runs beside what, and only what spares energy spares time."
    )
    for model, of in every.items():
        update = _update(model, of)
        text += update + _target(b, model, of, "Its" if update else f"{TITLES[model]}'s")
    return Markdown(text)


def _update(model: str, of: dict[str, object]) -> str:
    """What the update adds to the energy of a step, after the backward and beside it."""
    if not {ALONE, AFTER, BESIDE} <= set(of):
        return ""
    alone, after, beside = (of[name].joules for name in (ALONE, AFTER, BESIDE))
    limit = of[ALONE].power_limit_w
    said = [f"{style.digits(more)} J ({time(1000 * more / limit)} ms at the limit) {where}"
            for more, where in ((after - alone, "after the backward"),
                                (beside - alone, "beside it"))]  # fmt: skip
    return (
        f" {TITLES[model]} with 16-bit weights takes {style.digits(alone)} J without an update, "
        f"and the update {' and '.join(said)}."
    )


def _target(b: Benchmark, model: str, of: dict[str, object], whose: str) -> str:
    """What a missed target is in energy."""
    aim = aimed(b, model)
    steps = [row for name, row in of.items() if name != ALONE]
    if aim is None or not steps:
        return ""
    best = min(steps, key=lambda row: row.joules)
    if least(best) <= aim:
        return ""
    allowed = aim * best.power_limit_w / 1000
    return (
        f" {whose} target, {time(aim)} ms, is {style.digits(allowed)} J at the limit; the least "
        f"that a step with an update takes is {style.digits(best.joules)} J. On this GPU what the "
        f"target lacks is {1 - allowed / best.joules:.0%} of that energy, not a better overlap."
    )

"""The trace beside the timer: the forward in every way, and every step."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.measured import time
from a2lib.report.chapters.profile.rows import (
    CONTEXTS,
    MODES,
    PLAIN,
    PROFILERS,
    WAYS,
    Profile,
    idle,
    title,
)
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table, folded

NEAR = 0.02  # two times closer than this are called the same
FIRST_MS = 0.5  # from the timer's first event to the first kernel's start, at the most
AGREES, SLOWED, OTHER = "agrees", "slowed", "other"


def verdict(row) -> str:
    """How a trace's forward stands to the timer's: it AGREES; it was SLOWED, since the timer says
    the same of the traced steps, but for what it has before the first kernel; or is OTHER."""
    if abs(row.ms / row.ms_timer - 1) <= NEAR:
        return AGREES
    if row.ms_traced <= row.ms_timer:
        return OTHER
    same = abs(row.ms / row.ms_traced - 1) <= NEAR or 0 <= row.ms_traced - row.ms <= FIRST_MS
    return SLOWED if same else OTHER


def forwards_of(p: Profile):
    """(words, model, context, row) of every forward: of the trace that has the least ranges."""
    for words, way in WAYS.items():
        for model in p.models:
            for context in CONTEXTS:
                row = p.forward(model, context, way)
                if row is not None:
                    yield words, model, context, row


def forwards(p: Profile, caption: str, name: str) -> Table:
    """Every forward by the timer and by the trace."""
    lines = [
        [words, title(model), style.tokens(context), time(row.ms_timer), time(row.ms_traced),
         time(row.ms), _percent(row.ms / row.ms_timer - 1), time(row.ms_busy), time(row.ms_range),
         PROFILERS[row.profiler]]
        for words, model, context, row in forwards_of(p)
    ]  # fmt: skip
    columns = ["way", "model", "tokens", "timer", "timer, traced", "first to last kernel", "off",
               "a kernel runs", "range on the host", "by"]  # fmt: skip
    frame = pd.DataFrame(lines, columns=columns)
    if set(frame["by"]) <= {PROFILERS["nsys"]}:
        frame = frame.drop(columns="by")
    return Table(frame, caption, name, left=2, keys=3)


def ranged(p: Profile) -> Markdown:
    """Which ranges the traces of the forwards have, since those around modules take time."""
    rows = {named(words, m, c): row for words, m, c, row in forwards_of(p)}
    if not rows:
        return Markdown(p.not_yet("forwards with ranges around the phases alone"))
    # Compiled code has no ranges around its modules.
    fine = [name for name, row in rows.items()
            if row.mode == "train-step" and row.compile == "none"]  # fmt: skip
    text = "These traces have ranges around the phases alone"
    if fine:
        text = f"{text}, but for {listed(fine)}" if len(fine) < len(rows) else "**Traces with "\
            "ranges around the phases alone are not measured yet**: all of these have one around "\
            "every module"  # fmt: skip
    return Markdown(f"{text}. With a range around every module, which tells parts apart, the host "
                    "takes longer.")  # fmt: skip


def agreement(p: Profile) -> Markdown:
    """In how many forwards the trace says what the timer says, and why it does not elsewhere."""
    found = [(named(words, m, c), row) for words, m, c, row in forwards_of(p)]
    if not found:
        return Markdown(p.not_yet("the forward by a trace and by the timer"))
    names = {kind: [name for name, row in found if verdict(row) == kind]
             for kind in (AGREES, SLOWED, OTHER)}  # fmt: skip
    text = (
        f"From the first kernel's start to the last one's end, {len(names[AGREES])} of "
        f"{len(found)} forwards are within {NEAR:.0%} of the timer's."
    )
    if names[SLOWED]:
        text += (
            f" In {listed(names[SLOWED])} the traced process takes longer: of its steps the timer "
            "says the same as the trace. There the host is what takes the time: a profiler adds to "
            "each launch, and one process's host is faster than another's."
        )
    for longer, why in (
        ("timer", "its first event is recorded before the first launch, and its last after the "
                  "last kernel has ended"),
        ("trace", "that is not explained"),
    ):  # fmt: skip
        gaps = {name: 1e3 * abs(row.ms_timer - row.ms)
                for name, row in found if verdict(row) == OTHER
                and (row.ms_timer > row.ms) == (longer == "timer")}  # fmt: skip
        if gaps:
            text += (f" In {listed(list(gaps))} the {longer} says more, by "
                     f"{us(list(gaps.values()))}: {why}.")  # fmt: skip
    before = [1e3 * (row.ms_traced - row.ms) for _, row in found]
    if min(before) > 0:
        text += (f" Of the traced steps themselves the timer says {us(before)} more than the "
                 "trace: its first event comes before the first launch.")  # fmt: skip
    shorter = [name for name, row in found if row.ms_range < (1 - NEAR) * row.ms]
    text += (
        f" The range on the host, which is what a timeline of the host shows, is shorter than the "
        f"kernels in {len(shorter)} of {len(found)}: it ends when the last kernel is launched, not "
        "when it has run."
    )
    return Markdown(text)


def named(words: str, model: str, context: int) -> str:
    plain = next(iter(WAYS))
    return f"{title(model)} at {style.tokens(context)}{'' if words == plain else f' ({words})'}"


def perturbed(p: Profile) -> Markdown:
    """How much longer the traced steps took, by the same timer."""
    rows = pick(p.table, phase="step", status="ok", **PLAIN)
    rows = rows[rows["ms_traced"].notna() & rows["ms_timer"].notna()]
    if not len(rows):
        return Markdown(p.not_yet("what a profiler adds"))
    told = []
    for mode in MODES:
        mine = pick(rows, mode=mode)
        if len(mine):
            ratio = mine["ms_traced"] / mine["ms_timer"]
            told.append(f"{style.between(ratio, '{:.2f}'.format)} times in a plain {mode}")
    return Markdown(f"By the same timer traced steps take {listed(told)} the time of others.")


def every(p: Profile, caption: str, name: str) -> Markdown:
    """The step of every trace, by whoever traced it, folded away."""
    lines = []
    order = {model: i for i, model in enumerate(p.models)}
    rows = pick(p.table, phase="step", status="ok")
    for words, way in WAYS.items():
        mine = pick(rows, **way)
        for row in sorted(mine.itertuples(), key=lambda r: (order.get(r.model, len(order)),
                                                            r.context, MODES.index(r.mode),
                                                            r.profiler)):  # fmt: skip
            gap = idle(row)
            lines.append([words, title(row.model), style.tokens(row.context), row.mode,
                          PROFILERS[row.profiler], time(row.ms_timer), time(row.ms_traced),
                          time(row.ms), time(row.ms_busy),
                          MISSING if gap is None else f"{gap:.0%}"])  # fmt: skip
    columns = ["way", "model", "tokens", "mode", "by", "timer", "timer, traced",
               "first to last kernel", "a kernel runs", "idle"]  # fmt: skip
    table = Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=3)
    return Markdown(folded(table, f"The {len(lines)} traces"))


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def us(values: list[float]) -> str:
    def written(us):
        return f"{style.digits(us)} µs" if us < 1e3 else f"{style.digits(us / 1e3)} ms"

    return style.between(values, written)

"""The trace beside the timer, what the host does, and the second profiler."""

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
from a2lib.report.tables import MISSING, Markdown, Table

NEAR = 0.02  # two times closer than this are called the same
HOST = 0.9  # where issuing takes this share of the time or more, the host is the limit
IDLE = 0.1  # a larger share of idle time is named
AGREES, SLOWED, OTHER = "agrees", "slowed", "other"


def verdict(row) -> str:
    """How a trace's forward stands to the timer's: it AGREES; it was SLOWED, since the timer says
    the same of the traced steps; or is OTHER."""
    if abs(row.ms / row.ms_timer - 1) <= NEAR:
        return AGREES
    return SLOWED if abs(row.ms / row.ms_traced - 1) <= NEAR else OTHER


def forwards(p: Profile, caption: str, name: str) -> Table:
    """The plain forward by the timer and by the trace."""
    lines = []
    for model in p.models:
        for context in CONTEXTS:
            row = p.forward(model, context)
            if row is None:
                continue
            lines.append([title(model), style.tokens(context), time(row.ms_timer),
                          time(row.ms_traced), time(row.ms), _percent(row.ms / row.ms_timer - 1),
                          time(row.ms_busy), time(row.ms_range),
                          PROFILERS[row.profiler]])  # fmt: skip
    columns = ["model", "tokens", "timer", "timer, traced", "first to last kernel", "off",
               "a kernel runs", "range on the host", "by"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def ranged(p: Profile) -> Markdown:
    """Which ranges the traces of the forwards have, since those around modules take time."""
    rows = {(m, c): p.forward(m, c) for m in p.models for c in CONTEXTS}
    rows = {at: row for at, row in rows.items() if row is not None}
    if not rows:
        return Markdown(p.not_yet("forwards with ranges around the phases alone"))
    fine = [f"{title(m)} at {style.tokens(c)}" for (m, c), row in rows.items()
            if row.mode == "train-step"]  # fmt: skip
    text = "These traces have ranges around the phases alone"
    if fine:
        text = f"{text}, but for {listed(fine)}" if len(fine) < len(rows) else "**Traces with "\
            "ranges around the phases alone are not measured yet**: all of these have one around "\
            "every module"  # fmt: skip
    return Markdown(f"{text}. With a range around every module, which tells parts apart, the host "
                    "takes longer.")  # fmt: skip


def agreement(p: Profile) -> Markdown:
    """In how many forwards the trace says what the timer says, and why it does not elsewhere."""
    found = [(m, c, p.forward(m, c)) for m in p.models for c in CONTEXTS]
    found = [one for one in found if one[2] is not None]
    if not found:
        return Markdown(p.not_yet("the forward by a trace and by the timer"))
    names = {kind: [f"{title(m)} at {style.tokens(c)}" for m, c, row in found
                    if verdict(row) == kind] for kind in (AGREES, SLOWED, OTHER)}  # fmt: skip
    text = (
        f"From the first kernel's start to the last one's end, {len(names[AGREES])} of "
        f"{len(found)} forwards are within {NEAR:.0%} of the timer's."
    )
    if names[SLOWED]:
        text += (
            f" In {listed(names[SLOWED])} the profiler itself is the difference: of the traced "
            "steps the timer says the same as the trace. It adds to each launch, and there the "
            "host is what takes the time."
        )
    for longer, why in (
        ("timer", "its first event is recorded before the first launch, and its last after the "
                  "last kernel has ended"),
        ("trace", "that is not explained"),
    ):  # fmt: skip
        gaps = {f"{title(m)} at {style.tokens(c)}": 1e3 * abs(row.ms_timer - row.ms)
                for m, c, row in found if verdict(row) == OTHER
                and (row.ms_timer > row.ms) == (longer == "timer")}  # fmt: skip
        if gaps:
            text += (f" In {listed(list(gaps))} the {longer} says more, by "
                     f"{_us(list(gaps.values()))}: {why}.")  # fmt: skip
    shorter = [(m, c) for m, c, row in found if row.ms_range < (1 - NEAR) * row.ms]
    text += (
        f" The range on the host, which is what a timeline of the host shows, is shorter than the "
        f"kernels in {len(shorter)} of {len(found)}: it ends when the last kernel is launched, not "
        "when it has run."
    )
    return Markdown(text)


def hosts(p: Profile, caption: str, name: str) -> Table:
    """The host's side of each step: kernels, idle share, issuing, launches, how far ahead."""
    lines = []
    for words, way in WAYS.items():
        for model in p.models:
            for context in CONTEXTS:
                row = p.row(model, context, way=way)
                if row is None:
                    continue
                each = None if pd.isna(row.ms_launching) else 1e3 * row.ms_launching / row.launches
                lines.append([
                    words, title(model), style.tokens(context), _whole(row.launches),
                    time(row.ms_timer), time(row.ms_busy), f"{idle(row):.0%}", time(row.ms_host),
                    time(each), time(row.ms_waiting),
                    time(None if pd.isna(row.us_queued) else row.us_queued / 1e3),
                ])  # fmt: skip
    columns = ["way", "model", "tokens", "kernels", "step, ms", "a kernel runs", "idle",
               "host issues, ms", "a launch, µs", "host waits, ms", "ahead, ms"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=3)


def idling(p: Profile) -> Markdown:
    """Which steps leave the GPU idle, and whether the host is why."""
    found = [(f"{title(m)} at {style.tokens(c)}{'' if way is PLAIN else f' ({words})'}", row)
             for words, way in WAYS.items() for m in p.models for c in CONTEXTS
             if (row := p.row(m, c, way=way)) is not None and idle(row) is not None]  # fmt: skip
    if not found:
        return Markdown(p.not_yet("how much of a step the GPU is idle"))
    idling = [(name, row) for name, row in found if idle(row) > IDLE]
    text = (
        f"No kernel runs in more than {IDLE:.0%} of the step in {len(idling)} of {len(found)} "
        "configurations"
    )
    if not idling:
        most = max(found, key=lambda one: idle(one[1]))
        return Markdown(f"{text}; the most is {idle(most[1]):.1%}, in {most[0]}: the host is "
                        "ahead everywhere.")  # fmt: skip
    issuing = [name for name, row in idling
               if not pd.isna(row.ms_host) and row.ms_host >= HOST * row.ms_timer]  # fmt: skip
    other = [name for name, _ in idling if name not in issuing]
    most = max(idling, key=lambda one: idle(one[1]))
    text += f", the most in {most[0]}, {idle(most[1]):.0%}."
    if issuing:
        text += (
            f" In {len(issuing)} of them ({listed(issuing)}) issuing the step takes the host "
            f"{HOST:.0%} of it or more: the GPU waits for launches, and fewer kernels, or one CUDA "
            "graph, would help."
        )
    if other:
        text += f" In {listed(other)} it does not, and the gaps have another reason."
    ahead = [row.us_queued for name, row in found if name not in issuing
             and not pd.isna(row.us_queued)]  # fmt: skip
    behind = [row.us_queued for name, row in idling if name in issuing
              and not pd.isna(row.us_queued)]  # fmt: skip
    if ahead and behind:
        same = " shows the same from the other side" if max(behind) < min(ahead) else ""
        text += (
            f" How far the host is ahead{same}: a kernel starts {_us(behind)} after its launch "
            f"there, and {_us(ahead)} elsewhere (medians)."
        )
    return Markdown(text)


def issuing(p: Profile) -> Markdown:
    """What the host does while it issues a plain forward, of the traces without modules' ranges."""
    rows = pick(p.table, mode="forward", phase="forward", status="ok", **PLAIN)
    rows = rows[rows["ms_launching"].notna()]
    if not len(rows):
        return Markdown(p.not_yet("what the host does while it issues"))
    inside = rows["ms_launching"] / rows["ms_range"]
    each = 1e3 * rows["ms_range"] / rows["launches"].astype(float)
    return Markdown(
        f"While it issues a plain forward, the host spends "
        f"{style.between(inside, '{:.0%}'.format)} of its time inside the calls that launch; "
        "the rest is Python and "
        f"PyTorch's way from an operator to its kernel. A kernel costs it {_us(list(each))} in "
        "all, under the profiler."
    )


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


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def _whole(value) -> str:
    return MISSING if pd.isna(value) else f"{int(value):,}"


def _us(values: list[float]) -> str:
    def written(us):
        return f"{style.digits(us)} µs" if us < 1e3 else f"{style.digits(us / 1e3)} ms"

    return style.between(values, written)

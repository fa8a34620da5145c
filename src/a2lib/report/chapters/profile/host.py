"""What the host does in a step: when the GPU waits for it, and how far it is ahead."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.measured import time
from a2lib.report.chapters.profile.rows import CONTEXTS, WAYS, Profile, ahead, title
from a2lib.report.chapters.profile.timer import NEAR, named, us
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

HOST = 0.9  # where issuing takes this share of the time or more, the host is the limit
IDLE = 0.1  # a larger share of idle time is named
FULL = 0.1  # queues that are shorter than the longest by no more than this are called full
BEHIND_US = 100  # a host whose launches wait less than this is not ahead


def hosts(p: Profile, caption: str, name: str) -> Table:
    """The host's side of each step: kernels, idle share, issuing, launches, how far ahead."""
    lines = []
    for words, model, context, way, row in _steps(p):
        each = None if pd.isna(row.ms_launching) else 1e3 * row.ms_launching / row.launches
        gap, depth = p.idle(model, context, way), ahead(row)
        lines.append([
            words, title(model), style.tokens(context), _whole(row.launches), time(row.ms_timer),
            time(row.ms_busy), time(p.replayed(model, context, way)),
            MISSING if gap is None else style.between(gap, "{:.0%}".format), time(row.ms_host),
            time(each), time(row.ms_waiting), MISSING if depth is None else _whole(round(depth)),
        ])  # fmt: skip
    columns = ["way", "model", "tokens", "kernels", "step, ms", "a kernel runs", "as one graph",
               "idle", "host issues, ms", "a launch, µs", "host waits, ms",
               "kernels ahead"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=3)


def idling(p: Profile) -> Markdown:
    """Which steps leave the GPU idle, and whether the host is why."""
    found = [(named(words, model, context), p.idle(model, context, way), row)
             for words, model, context, way, row in _steps(p)]  # fmt: skip
    found = [one for one in found if one[1] is not None]
    if not found:
        return Markdown(p.not_yet("how much of a step the GPU is idle"))
    idling = [one for one in found if one[1][0] > IDLE]
    text = (
        f"The GPU is idle for more than {IDLE:.0%} of the step, by every timer, in {len(idling)} "
        f"of {len(found)} configurations"
    )
    if not idling:
        name, gap, _ = max(found, key=lambda one: one[1][1])
        return Markdown(f"{text}; the most is {gap[1]:.1%}, in {name}.")
    shown = [f"{name} ({style.between(gap, '{:.0%}'.format)})" for name, gap, _ in idling]
    text += f": {listed(shown)}."
    # A comparison with what was not measured is false.
    issuing = [one for one in idling if one[2].ms_host >= HOST * one[2].ms_timer]
    other = [name for name, *_ in idling if name not in [one[0] for one in issuing]]
    if issuing:
        which = "There" if not other else f"In {listed([name for name, *_ in issuing])}"
        text += (
            f" {which} issuing the step takes the host {HOST:.0%} of it or more: the GPU waits "
            "for launches."
        )
    if other:
        text += f" In {listed(other)} it does not, and the gaps have another reason."
    behind = [row.us_queued for *_, row in issuing if not pd.isna(row.us_queued)]
    before = [row.us_queued for name, _, row in found if name not in [one[0] for one in idling]
              and not pd.isna(row.us_queued)]  # fmt: skip
    if behind and before:
        text += (
            f" A kernel starts {us(behind)} after its launch there, and {us(before)} elsewhere "
            "(medians)."
        )
    return Markdown(text)


def graphs(p: Profile) -> Markdown:
    """The test of it: the same kernels as one CUDA graph, which the host launches once."""
    found = []
    for words, model, context, way, row in _steps(p):
        ms = p.replayed(model, context, way)
        if ms is not None and not pd.isna(row.ms_busy):
            found.append((named(words, model, context), ms, float(row.ms_busy), row.ms_timer))
    if not found:
        return Markdown(p.not_yet("the same steps as one CUDA graph"))
    name, ms, busy, eager = min(found, key=lambda one: one[1] / one[3])
    ratios = [ms / busy for _, ms, busy, _ in found]
    return Markdown(
        "**A test of that.** Captured as one CUDA graph, which takes the host one launch, a step "
        "should take as long as its kernels run. The benchmark's replays take "
        f"{style.between(ratios, '{:.2f}'.format)} times that in {len(found)} configurations: "
        f"{name}, {style.digits(ms)} ms for {style.digits(busy)} ms of kernels, and "
        f"{style.digits(eager)} ms without a graph. "
        + ("So the gaps are the host's." if max(abs(r - 1) for r in ratios) <= 2 * NEAR else
           "Where it takes longer, the gaps are not the host's alone.")
    )  # fmt: skip


def unsteady(p: Profile) -> Markdown:
    """How far apart the timers of one step are, since its idle share rests on them."""
    found = []
    for words, model, context, way, _ in _steps(p):
        timers = p.timers(model, context, way=way)
        if len(timers) > 1:
            found.append((named(words, model, context), min(timers), max(timers)))
    if not found:
        return Markdown("")
    name, low, high = max(found, key=lambda one: one[2] / one[1])
    near = [one for one in found if one[2] / one[1] <= 1 + NEAR]
    return Markdown(
        f"A host is not equally fast in every process: the same step, timed in several of them, is "
        f"within {NEAR:.0%} in {len(near)} of {len(found)} configurations, and differs most in "
        f"{name}, {style.digits(low)} to {style.digits(high)} ms. So idle shares are given as the "
        "timers have them, from the least to the most."
    )


def queue(p: Profile) -> Markdown:
    """How many launches wait for the GPU, and whether they reach a limit."""
    found = [(named(words, model, context), ahead(row), row)
             for words, model, context, _, row in _steps(p)]  # fmt: skip
    found = [one for one in found if one[1] is not None]
    if not found:
        return Markdown(p.not_yet("how far the host is ahead"))
    most = max(depth for _, depth, _ in found)
    full = [one for one in found if one[1] >= (1 - FULL) * most]
    if len(full) < 3:
        return Markdown(f"The host is at most {most:,.0f} kernels ahead.")
    each = [1e3 * row.ms_launching / row.launches for *_, row in full
            if not pd.isna(row.ms_launching)]  # fmt: skip
    depths = style.between([depth for _, depth, _ in full], "{:,.0f}".format)
    return Markdown(
        f"Where the GPU is the limit, the host runs ahead, but no further than some {depths} "
        f"kernels, whatever a kernel takes ({listed([name for name, *_ in full])}). That is a full "
        "queue: the next launch does not return before a kernel has ended"
        + (f", and takes {us(each)} in the mean. Such launches are the long ones in the pictures "
           "below" if each else "")
        + ". There the time that the host takes to issue a step is the GPU's."
    )  # fmt: skip


def issuing(p: Profile) -> Markdown:
    """What the host does while it issues a forward and is not ahead of the GPU, of the traces
    without modules' ranges."""
    told = []
    for words, way in WAYS.items():
        rows = pick(p.table, mode="forward", phase="forward", status="ok", **way)
        rows = rows[rows["ms_launching"].notna() & (rows["us_queued"] < BEHIND_US)]
        if not len(rows):
            continue
        inside = rows["ms_launching"] / rows["ms_range"]
        launches = rows["launches"].astype(float)
        with_, without = (1e3 * rows[c] / launches for c in ("ms_range", "ms_host"))
        names = [f"{title(r.model)} at {style.tokens(r.context)}" for r in rows.itertuples()]
        told.append(
            f"{words} ({listed(names)}): {us(list(without))} a kernel, and {us(list(with_))} "
            f"under the profiler, of which {style.between(inside, '{:.0%}'.format)} inside the "
            "calls that launch"
        )
    if not told:
        return Markdown(p.not_yet("what the host does while it issues"))
    return Markdown(
        f"What a kernel of a forward costs the host where the GPU waits for launches, in "
        f"{'; in '.join(told)}. The rest is Python and PyTorch's way from an operator to its "
        "kernel."
    )


def _steps(p: Profile):
    """(words, model, context, way, row) of every train-step that was traced."""
    for words, way in WAYS.items():
        for model in p.models:
            for context in CONTEXTS:
                row = p.row(model, context, way=way)
                if row is not None:
                    yield words, model, context, way, row


def _whole(value) -> str:
    return MISSING if pd.isna(value) else f"{int(value):,}"

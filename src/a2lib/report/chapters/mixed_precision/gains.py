"""What each precision gains in the GPU's own time, by pass and size, and the estimate beside it.

A replay of a CUDA graph has no phases, so a backward is what a captured forward-backward takes
beyond a captured forward; the loss, forward and backward, is in it. Where nothing is captured, a
pass as called is the GPU's time if the host keeps ahead of it in every precision compared.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D

from a2lib.report import panels, style
from a2lib.report.chapters.benchmark.rows import OURS, PLAIN, TITLES
from a2lib.report.chapters.mixed_precision.rows import PRECISIONS, Mixed
from a2lib.report.chapters.mixed_precision.speed import (
    CONTEXT,
    MODELS,
    PASSES,
    contexts,
    estimate,
    found,
    has,
    of_host,
    steps,
)
from a2lib.report.metrics import pick
from a2lib.report.style import INK, PAPER, Chart, listed
from a2lib.report.tables import MISSING, Markdown, Table

Case = tuple[str, int, str]  # model, context, pass
Times = dict[str, float]  # precision -> ms
GAINED = {"tf32": ("#00825f", "^"), "bf16": ("#d55e00", "o")}


def replayed(mixed: Mixed) -> dict[Case, Times]:
    """(model, context, pass) -> the times of replays, where fp32 and another have one."""
    rows = pick(steps(mixed, capture=True, phases=("step",)), status="ok")
    timed = {(r.model, r.context, r.mode, r.precision): r for r in rows.itertuples()}
    made: dict[Case, Times] = {}
    for (model, context, mode, precision), row in timed.items():
        if mode == "forward":
            made.setdefault((model, context, "forward"), {})[precision] = float(row.ms)
            both = timed.get((model, context, "forward-backward", precision))
            if both is not None and mixed.one_commit(row, both):
                backward = float(both.ms - row.ms)
                made.setdefault((model, context, "backward"), {})[precision] = backward
    return {case: ms for case, ms in made.items() if "fp32" in ms and len(ms) > 1}


def ahead(mixed: Mixed) -> dict[Case, Times]:
    """The same of times as called, of the precisions in which the host keeps ahead."""
    rows, made = steps(mixed), {}
    for model in MODELS:
        for context in contexts(rows):
            for pass_ in PASSES:
                mine = found(rows, model, context, pass_)
                timed = [mine[p] for p in PRECISIONS if has(mine, p)]
                ms = {row.precision: float(row.ms) for row in timed
                      if not pd.isna(row.ms_host) and not of_host(rows, row)}  # fmt: skip
                if {"fp32", "bf16"} <= ms.keys():
                    made[model, context, pass_] = ms
    return made


def times(mixed: Mixed) -> dict[Case, Times]:
    """The GPU's times: of replays, else as called. A model's passes are of one kind."""
    captured, called = replayed(mixed), ahead(mixed)
    whole = {case[:2] for case in captured}
    return {**{case: ms for case, ms in called.items() if case[:2] not in whole}, **captured}


def table(mixed: Mixed, caption: str, label: str) -> Table:
    """The GPU's time of forward and backward in each precision, and the gains over fp32."""
    known, captured, lines = times(mixed), replayed(mixed), []
    shown = sorted({CONTEXT, *(context for _, context, _ in known)})
    for model in MODELS:
        for context in shown:
            cells = []
            for pass_ in PASSES:
                ms = known.get((model, context, pass_), {})
                cells += [style.digits(ms[p]) if p in ms else MISSING for p in PRECISIONS]
                cells += [f"{ms['fp32'] / ms[p]:.2f}×" if p in ms else MISSING
                          for p in PRECISIONS[1:]]  # fmt: skip
            if set(cells) != {MISSING} or context == CONTEXT:
                how = "replay" if (model, context, "forward") in captured else "as called"
                lines.append([TITLES[model], style.tokens(context),
                              MISSING if set(cells) == {MISSING} else how, *cells])  # fmt: skip
    columns = ["model", "context", "how"]
    for i, pass_ in enumerate(PASSES):
        space = " " * i
        columns += [f"{pass_}: fp32", *(f"{p}{space}" for p in PRECISIONS[1:]),
                    *(f"gain of {p}{space}" for p in PRECISIONS[1:])]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=1, keys=2)


def of_pass(known: dict[Case, Times], context: int, pass_: str) -> Times:
    """Model -> the GPU's time in fp32 over that in bf16, smallest model first, of ``times()``."""
    cases = {model: known.get((model, context, pass_)) for model in MODELS}
    return {model: ms["fp32"] / ms["bf16"] for model, ms in cases.items() if ms and "bf16" in ms}


def trend(mixed: Mixed) -> Markdown:
    """The gain of the smallest and the largest size, by pass, and whether it grows all the way;
    which sizes were tried and have no time, and which are not measured."""
    text, lacking, known = [], set(), times(mixed)
    for pass_ in PASSES:
        gains = of_pass(known, CONTEXT, pass_)
        lacking |= set(MODELS) - set(gains)
        if len(gains) == 1:
            text += [f"{pass_} {gain:.2f}× ({TITLES[model]})" for model, gain in gains.items()]
        elif gains:
            made = list(gains.items())
            grows = list(gains.values()) == sorted(gains.values())
            ends = [f"{gain:.2f}× ({TITLES[model]})" for model, gain in (made[0], made[-1])]
            how = "growing with every size" if grows else "not growing with every size"
            text.append(f"{pass_} from {ends[0]} to {ends[1]}, {how}")
    tried = {m: found for m in MODELS if m in lacking and (found := refused(mixed, m))}
    lacking -= set(tried)
    without = "".join(
        f" {TITLES[model]} has no time of "
        f"{listed([f'{which} ({status})' for which, status in found.items()])}."
        for model, found in tried.items()
    ) + "".join(_fitting(mixed, model) for model in tried)
    absent = mixed.not_yet(
        "the GPU's own time in each precision, of "
        f"{listed([TITLES[m] for m in MODELS if m in lacking])}" if lacking else ""
    )  # fmt: skip
    if not text:
        return Markdown(f"{absent} What follows is the estimate.")
    said = f"In the GPU's own time bf16 gains over fp32 at {CONTEXT} tokens: {'; '.join(text)}."
    said += without
    return Markdown(f"{said} {absent}" if lacking else said)


def refused(mixed: Mixed, model: str) -> dict[str, str]:
    """Mode and precision -> status, of the model's replays in fp32 and bf16 that were tried and
    have no time."""
    rows = pick(steps(mixed, capture=True, phases=("step",)), model=model, context=CONTEXT)
    rows = rows[rows["mode"].isin(("forward", "forward-backward"))
                & rows["precision"].isin(("fp32", "bf16"))]  # fmt: skip
    return {f"`{r.mode}` in {r.precision}, captured": style.STATUS.get(r.status, r.status)
            for r in rows.itertuples() if r.status != "ok"}  # fmt: skip


def _fitting(mixed: Mixed, model: str) -> str:
    """What forward and backward take in bf16 with our attention and compiled, beside fp32."""
    rows = pick(mixed.steps, model=model, mode="forward-backward", phase="step", status="ok")
    captured = rows["capture"].astype(str).str.lower() == "true"
    rows = rows[(rows["context"].astype(int) == CONTEXT) & captured]
    ours, plain = (pick(rows, **way)["ms"] for way in (OURS, PLAIN))
    if not (len(ours) and len(plain)):
        return ""
    return (
        " With our attention and compiled blocks they fit, and a replay of both takes "
        f"{style.digits(float(ours.iloc[0]))} ms, in fp32 with attention by its definition "
        f"{style.digits(float(plain.iloc[0]))}."
    )


def chart(mixed: Mixed) -> Chart:
    """The gains over fp32 by model: of the forward as estimated (dashed), and of both passes as
    measured in the GPU's own time."""
    known = times(mixed)
    estimated = {model: ms for model in MODELS if (ms := estimate(mixed, model, CONTEXT))}
    measured = {pass_: {m: ms for m in MODELS if (ms := known.get((m, CONTEXT, pass_)))}
                for pass_ in PASSES}  # fmt: skip
    if not (estimated or any(measured.values())):
        return panels.empty()
    places = range(len(MODELS))

    def gain(ms: Times | None, precision: str) -> float:
        return ms["fp32"] / ms[precision] if ms and precision in ms else float("nan")

    def draw(figure):
        ax, marks = figure.subplots(), []
        for precision in PRECISIONS[1:]:
            colour, marker = GAINED[precision]
            if estimated:
                ax.plot(places, [gain(estimated.get(m), precision) for m in MODELS], color=colour,
                        linewidth=1.2, linestyle=(0, (4, 3)))  # fmt: skip
                marks.append(Line2D([], [], color=colour, linestyle=(0, (4, 3)),
                                    label=f"{precision}: forward, estimated"))  # fmt: skip
            for pass_, fill in zip(PASSES, (colour, PAPER), strict=True):
                values = [gain(measured[pass_].get(m), precision) for m in MODELS]
                look = {"color": colour, "marker": marker, "markerfacecolor": fill}
                ax.plot(places, values, linewidth=1.2, markersize=6, **look)
                marks.append(Line2D([], [], linestyle="", **look, label=f"{precision}: {pass_}"))
        ax.axhline(1, color=INK, linewidth=0.8)
        ax.set_xticks(places, [TITLES[m] for m in MODELS])
        ax.set_xlim(-0.4, len(MODELS) - 0.6)
        ax.set_ylim(bottom=0)
        ax.set_ylabel("gain over fp32")
        panels.legend(figure, marks, columns=2)

    return Chart(draw, height=3.6 + panels.legend_height(6, 2))


def against_estimate(mixed: Mixed) -> Markdown:
    """The measured gain of the forward beside the estimated one, where both are there."""
    text, known = [], times(mixed)
    for context in sorted({context for _, context, _ in known}):
        for model, gain in of_pass(known, context, "forward").items():
            ms = estimate(mixed, model, context)
            if ms:
                text.append(f"{TITLES[model]} at {style.tokens(context)}: {gain:.2f}× measured, "
                            f"{ms['fp32'] / ms['bf16']:.2f}× estimated")  # fmt: skip
    if not text:
        return Markdown(mixed.not_yet("gains in the GPU's own time beside this estimate"))
    return Markdown(f"Forward, in the GPU's own time: {'; '.join(text)}.")

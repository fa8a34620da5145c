"""Our attention beside PyTorch's own in a whole step, and the targets."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.benchmark.estimate import floors
from a2lib.report.chapters.benchmark.rows import (
    AUTOCAST,
    CONTEXT,
    CONTEXTS,
    EAGER_OURS,
    MODELS,
    OURS,
    PEER,
    PLAIN,
    TITLES,
    Benchmark,
)
from a2lib.report.chapters.measured import HOST, time
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.roofline import NARROW

# What was aimed at before anything was measured: ms of a captured step, or for the others a share
# of the compiled step with PyTorch's own attention, as called.
TARGETS = {"small": 8.0, "xl25": 72.0}
SHARE = 0.75
SHOWN = ("small", "xl25", "2.7B")  # on the landing page


def rows(b: Benchmark) -> pd.DataFrame:
    """The rows that this part speaks of."""
    return b.table[b.table["precision"].isin(["bf16", NARROW])]


def pair(b: Benchmark, model: str, context: int, theirs: dict, ours: dict, capture: bool = False):
    """The wall rows of two ways, timed and of one run; (None, None) where that is not so."""
    found = [b.row(model, context, way=way, capture=capture) for way in (theirs, ours)]
    if any(row is None or row.status != "ok" for row in found) or found[0].run != found[1].run:
        return None, None
    return tuple(found)


def cases(b: Benchmark, theirs: dict, ours: dict, capture: bool = False) -> dict:
    """(model, context) -> the two rows, of those that are both there."""
    found = {(m, c): pair(b, m, c, theirs, ours, capture) for m in MODELS for c in CONTEXTS}
    return {case: rows for case, rows in found.items() if rows[0] is not None}


def table(b: Benchmark, caption: str, name: str) -> Table:
    """The train-step with PyTorch's own attention and with ours: compiled, as called and captured,
    and in eager mode with the attention of the definition and with ours."""
    columns = {
        "compiled: PyTorch's": (PEER, OURS, False),
        "captured: PyTorch's": (PEER, OURS, True),
        "eager: by definition": (AUTOCAST, EAGER_OURS, False),
    }
    lines = []
    for model in MODELS:
        for context in CONTEXTS:
            cells = []
            for ways in columns.values():
                theirs, ours = pair(b, model, context, *ways)
                cells += [MISSING] * 3 if ours is None else [
                    time(theirs.ms), time(ours.ms), f"{ours.ms / theirs.ms:.2f}"]  # fmt: skip
            if set(cells) != {MISSING}:
                lines.append([TITLES[model], style.tokens(context), *cells])
    heads = [head for i, first in enumerate(columns)
             for head in (first, f"ours{' ' * i}", f"ratio{' ' * i}")]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=["model", "tokens", *heads]), caption, name, left=1,
                 keys=2)  # fmt: skip


def results(b: Benchmark, caption: str, name: str) -> Table:
    """The chapter's results for the landing page: ours, PyTorch's own attention, plain fp32."""
    lines = []
    for model in SHOWN:
        theirs, ours = pair(b, model, CONTEXT, PEER, OURS, capture=True)
        found = [None if row is None else row.ms for row in (ours, theirs)]
        found += [b.ms(model, CONTEXT, way=way) for way in (PEER, PLAIN)]
        cells = [MISSING if ms is None else f"{time(ms)} ms" for ms in found]
        if found[0] is not None:
            cells[0] = f"**{cells[0]}**"
        lines.append([TITLES[model], *cells, "{numref}`tab-benchmark-attention`"])
    columns = ["train-step, bf16", "ours, captured", "PyTorch's attention, captured",
               "the same, launched", "plain fp32", "evidence"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=6)


def behind_results(b: Benchmark) -> pd.DataFrame:
    """The rows that the figures of results() come from."""
    at = b.table[
        b.table["model"].isin(SHOWN)
        & (b.table["context"].astype(int) == CONTEXT)
        & (b.table["phase"] == "wall")
        & (b.table["mode"] == "train-step")
    ]
    shown = [{**OURS, "capture": True}, PEER, {**PLAIN, "capture": False}]
    return pd.concat([pick(at, **way) for way in shown])


def beside(b: Benchmark) -> Markdown:
    """Who is faster: replayed, as called, and in eager mode; and what the host has to do with
    it."""
    replayed, called = cases(b, PEER, OURS, True), cases(b, PEER, OURS)
    eager = cases(b, AUTOCAST, EAGER_OURS)
    if not (replayed and called and eager):
        return Markdown(b.not_yet("our attention beside PyTorch's own in the same step"))
    ratios = [ours.ms / theirs.ms for theirs, ours in replayed.values()]
    faster = sum(ratio < 1 for ratio in ratios)
    text = (
        f"Replayed, where nothing but the GPU counts, a compiled step with our attention is faster "
        f"than with PyTorch's in {faster} of {len(ratios)} cases and takes "
        f"{style.between(ratios, '{:.2f}'.format)} of its time. {_called(b, called)} In eager mode "
        f"the step with ours takes {_range(eager)} of the time of the one with attention by its "
        "definition"
    )
    bound = sum(_host_bound(b, *case, EAGER_OURS) for case in eager)
    which = "is the host's" if bound == 1 else "are the host's"
    text += f"; {bound} of these {len(eager)} times {which}" if bound else ""
    slower = [case for case, rows in eager.items() if _behind(*rows)]
    if slower:
        text += f". By more than the spread of the steps it is slower in {_cases(slower)}"
        if all(_host_bound(b, *case, EAGER_OURS) for case in slower):
            text += ", where its time is the host's"
    return Markdown(f"{text}.")


def _called(b: Benchmark, called: dict) -> str:
    slower = [case for case, rows in called.items() if _behind(*rows)]
    if not slower:
        return f"Launched kernel by kernel ours is slower in none of {len(called)}."
    text = (
        f"Launched kernel by kernel ours is slower, by more than the spread of the steps, in "
        f"{len(slower)} of {len(called)} ({_cases(slower)})"
    )
    bound = [(m, c) for m, c in slower if _host_bound(b, m, c, OURS, "forward")]
    if len(bound) == len(slower):
        more = [b.host(m, c, OURS) - b.host(m, c, PEER) for m, c in slower]
        text += (
            f", in all of which the forward, with which a step begins, takes the host's time: "
            f"issuing the step with our operator took it {style.between(more, style.digits)} ms "
            "longer"
        )
    elif bound:
        text += f"; the forward takes the host's time in {_cases(bound)}"
    return f"{text}.{_host_range(b)}"


def _host_range(b: Benchmark) -> str:
    """How far the host's time for the same launches differs between contexts of one run, at its
    widest."""
    spans = {}
    for model in MODELS:
        for which, way in (("ours", OURS), ("PyTorch's", PEER)):
            of_run: dict[str, list[float]] = {}  # another may have been on another machine
            for c in CONTEXTS:
                if _host_bound(b, model, c, way):
                    run = b.row(model, c, "step", way=way).run
                    of_run.setdefault(run, []).append(b.host(model, c, way))
            known = max(of_run.values(), key=lambda times: max(times) / min(times), default=[])
            if len(known) > 1:
                spans[model, which] = min(known), max(known)
    if not spans:
        return ""
    (model, which), (low, high) = max(spans.items(), key=lambda item: item[1][1] / item[1][0])
    return (
        f" Such a time is that of the machine and of the moment: the same launches of the "
        f"{TITLES[model]} model with {which} took the host {style.digits(low)} to "
        f"{style.digits(high)} ms at different contexts of one run."
    )


def targets(b: Benchmark, caption: str, name: str) -> Table:
    """What was aimed at, what came out, the host's share of the step as called, and the floor."""
    lines = []
    for model in MODELS:
        captured = b.ms(model, CONTEXT, way=OURS, capture=True)
        called, aim = b.ms(model, CONTEXT, way=OURS), aimed(b, model)
        if captured is None and not _refused(b, model):
            continue
        least = floors(b, model, "bf16", True)
        verdict = "does not fit" if captured is None else MISSING
        if captured and aim:
            verdict = "met" if captured <= aim else "missed"
        share = 1 - captured / called if captured and called else None
        lines.append([
            TITLES[model], time(aim), time(captured), verdict, time(called),
            MISSING if share is None else style.share(share),
            time(least["total"].ms) if least else MISSING,
            f"{least['total'].ms / aim:.0%}" if least and aim else MISSING,
        ])  # fmt: skip
    columns = ["model", "target", "captured", "verdict", "launched", "a replay spares", "floor",
               "floor over target"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def aimed(b: Benchmark, model: str) -> float | None:
    """What the captured step may take, in ms; None where the step that it is a share of has no time
    in its run."""
    if model in TARGETS:
        return TARGETS[model]
    plain, ours = (b.row(model, CONTEXT, way=way, capture=way is OURS) for way in (PEER, OURS))
    if plain is None or ours is None or plain.status != "ok" or plain.run != ours.run:
        return None
    return SHARE * float(plain.ms)


def reached(b: Benchmark) -> Markdown:
    """Which targets are met and missed, by how much, and what stands in the way of the missed."""
    met, missed, why = [], [], []
    for model in MODELS:
        captured, aim = b.ms(model, CONTEXT, way=OURS, capture=True), aimed(b, model)
        if captured and aim:
            found = f"{TITLES[model]} with {time(captured)} ms (at most {time(aim)})"
            (met if captured <= aim else missed).append(found)
            why += [_why(b, model)] if captured > aim else []
    if not (met or missed):
        return Markdown(b.not_yet("whether the targets are met"))
    for case, rows in cases(b, AUTOCAST, EAGER_OURS).items():
        if case[1] == CONTEXT and _behind(*rows):
            missed.append(f"{TITLES[case[0]]} in eager mode with {time(rows[1].ms)} ms (at most "
                          f"{time(rows[0].ms)})")  # fmt: skip
    text = f"Met: {listed(met)}." if met else "None is met."
    text += f" Missed: {listed(missed)}." if missed else " None is missed."
    if not any("eager" in found for found in missed) and cases(b, AUTOCAST, EAGER_OURS):
        text += (
            f" In eager mode, at {CONTEXT} tokens, ours is slower for no size by more than the "
            "spread of the steps."
        )
    return Markdown(" ".join([text, *filter(None, why), *filter(None, [_lent(b)])]))


def _lent(b: Benchmark) -> str:
    """The targets that are shares of a time that is the host's."""
    told = []
    for model in MODELS:
        host, step = b.host(model, CONTEXT, PEER), b.ms(model, CONTEXT, way=PEER)
        replay = b.ms(model, CONTEXT, way=PEER, capture=True)
        if model not in TARGETS and aimed(b, model) and host and replay and host > replay:
            told.append(f"{TITLES[model]} {time(step)} ms, replayed {time(replay)}")
    if not told:
        return ""
    return (
        "A quicker host would ask for more where the time of the plain compiled step is the host's "
        f"({'; '.join(told)})."
    )


def _why(b: Benchmark, model: str) -> str:
    least, aim = floors(b, model, "bf16", True), aimed(b, model)
    if not least:
        return ""
    products, update = least["products"].ms, least["optimizer"].ms
    least = least["total"].ms
    captured = b.ms(model, CONTEXT, way=OURS, capture=True)
    text = (
        f"The floor of {TITLES[model]} is {time(least)} ms (products at the measured rate "
        f"{time(products)}, all else at the measured bandwidth {time(least - products)}, of which "
        f"AdamW's bytes take {time(update)}), "
    )
    if least > aim:
        text += (
            "above its target: with fp32 weights, and each kernel after the one before, no step "
            "reaches it on this GPU."
        )
    else:
        text += (
            f"{least / aim:.0%} of its target: to meet it the step would have to be within "
            f"{aim / least - 1:.0%} of the floor, and it is {captured / least - 1:.0%} above."
        )
    host, gpu = b.host(model, CONTEXT, PEER), b.ms(model, CONTEXT, "step", way=PEER, capture=True)
    if host and gpu and host < gpu:
        text += (
            f" Its plain compiled step is the GPU's already (the host needs {time(host)} ms of "
            f"{time(gpu)}), so that a capture takes nothing away."
        )
    return text


def _behind(theirs, ours) -> bool:
    return ours.ms > theirs.ms and not metrics.level(ours, theirs)


def _host_bound(b: Benchmark, model: str, context: int, way: dict, phase: str = "step") -> bool:
    row = b.row(model, context, phase, way=way)
    known = row is not None and row.status == "ok" and not pd.isna(row.ms_host)
    return bool(known and row.ms_host >= HOST * row.ms)


def _refused(b: Benchmark, model: str) -> bool:
    return b.row(model, CONTEXT, way=OURS, capture=True) is not None


def _range(found: dict) -> str:
    return style.between([ours.ms / theirs.ms for theirs, ours in found.values()], "{:.2f}".format)


def _cases(found: list) -> str:
    return listed([f"{TITLES[m]} at {style.tokens(c)}" for m, c in found])

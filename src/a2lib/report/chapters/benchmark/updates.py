"""The captured step with this library's AdamW: 16-bit weights, an update beside the backward."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.benchmark.estimate import floors, hidden, idle
from a2lib.report.chapters.benchmark.rows import CONTEXT, MODELS, OURS, TITLES, Benchmark
from a2lib.report.chapters.benchmark.speed import aimed
from a2lib.report.chapters.measured import time
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.roofline import NARROW

OVERLAPPED = "overlapped-step"
NARROW_WAY = {**OURS, "precision": NARROW}
# What the column is called, in a sentence, its way and its mode; the first is what is improved on.
WAYS = (
    ("fp32 weights", "PyTorch's AdamW", OURS, "train-step"),
    ("AdamW overlapped", "AdamW beside the backward", OURS, OVERLAPPED),
    ("16-bit weights", "16-bit weights", NARROW_WAY, "train-step"),
    ("both", "both", NARROW_WAY, OVERLAPPED),
)


def found(b: Benchmark, model: str) -> dict[str, object]:
    """The captured wall rows that there are, by the name of their way, timed and of one run."""
    rows = {name: b.row(model, CONTEXT, way=way, mode=mode, capture=True)
            for name, _, way, mode in WAYS}  # fmt: skip
    timed = {name: row for name, row in rows.items() if row is not None and row.status == "ok"}
    first = timed.get(WAYS[0][0])
    if first is None:
        return {}
    return {name: row for name, row in timed.items() if row.run == first.run}


def table(b: Benchmark, caption: str, name: str) -> Table:
    """The captured step of each way, the best one's share of the first, and the floors of 16-bit
    weights: one kernel after another, and with the optimizer beside the backward."""
    lines = []
    for model in MODELS:
        rows = found(b, model)
        if len(rows) < 2:
            continue
        times = {way: float(row.ms) for way, row in rows.items()}
        least = floors(b, model, NARROW, True)
        lines.append([
            TITLES[model],
            *(time(times.get(way)) for way, *_ in WAYS),
            f"{min(times.values()) / times[WAYS[0][0]]:.2f}",
            time(least["total"].ms) if least else MISSING, time(hidden(b, model, NARROW)),
            time(aimed(b, model)),
        ])  # fmt: skip
    columns = ["model", *(way for way, *_ in WAYS), "best over first",
               "floor, 16-bit weights", "floor, update hidden", "target"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def sentence(b: Benchmark) -> Markdown:
    """What each of the two spares, and which targets are met with them that are missed without."""
    cases = {model: rows for model in MODELS if len(rows := found(b, model)) > 1}
    if not cases:
        return Markdown(b.not_yet("the step with 16-bit weights, and with AdamW overlapped"))
    told = []
    for name, words, *_ in WAYS[1:]:
        pairs = [(model, rows[WAYS[0][0]], rows[name])
                 for model, rows in cases.items() if name in rows]  # fmt: skip
        if pairs:
            ratios = [row.ms / first.ms for _, first, row in pairs]
            slower = [TITLES[model] for model, first, row in pairs
                      if row.ms > first.ms and not metrics.level(row, first)]  # fmt: skip
            text = f"with {words} {style.between(ratios, '{:.2f}'.format)}"
            told.append(text + (f" (slower: {listed(slower)})" if slower else ""))
    text = f"Of the captured step with PyTorch's AdamW and fp32 weights it takes {listed(told)}."
    text += _spared(b, cases)
    met, missed, left = [], [], []
    for model, rows in cases.items():
        aim, first = aimed(b, model), rows[WAYS[0][0]]
        if aim is None or first.ms <= aim:
            continue
        name, best = min(rows.items(), key=lambda item: item[1].ms)
        words = {way: said for way, said, *_ in WAYS}[name]
        said = f"{TITLES[model]} with {time(best.ms)} ms (at most {time(aim)}; {words})"
        (met if best.ms <= aim else missed).append(said)
        left += [_left(b, model, rows)] if best.ms > aim else []
    if met:
        text += f" The target that is missed above is met so by {listed(met)}."
    if missed:
        text += f" Missed all the same: {listed(missed)}.{''.join(left)}"
    return Markdown(text)


def _spared(b: Benchmark, cases: dict) -> str:
    """What 16-bit weights spare beside what their floor is lower by, and what the overlap spares of
    the optimizer's own floor."""
    first, alone, both = (WAYS[i][0] for i in (0, 2, 3))
    text, known = "", [m for m in cases if floors(b, m, NARROW, True)]
    pairs = [m for m in known if alone in cases[m] and cases[m][alone].ms < cases[m][first].ms]
    if pairs:
        model = pairs[-1]
        lower = [floors(b, model, p, True)["total"].ms for p in ("bf16", NARROW)]
        text += (
            f" 16-bit weights spare {TITLES[model]} "
            f"{time(cases[model][first].ms - cases[model][alone].ms)} ms, where its floor is lower "
            f"by {time(lower[0] - lower[1])}."
        )
    shares = {m: (cases[m][alone].ms - cases[m][both].ms)
              / floors(b, m, NARROW, True)["optimizer"].ms
              for m in known if alone in cases[m] and both in cases[m]}  # fmt: skip
    if shares and min(shares.values()) > 0:
        text += (
            " Running beside the backward hides "
            f"{style.between(shares.values(), '{:.0%}'.format)} of the least that the optimizer "
            "takes"
        )
        close = [TITLES[m] for m in shares if metrics.level(cases[m][alone], cases[m][both])]
        text += f"; by their spreads the two steps are level for {listed(close)}." if close else "."
    return text


def _left(b: Benchmark, model: str, rows: dict) -> str:
    """What a missed step consists of with 16-bit weights, one kernel after another, and how much
    of the optimizer the overlap would have to hide."""
    least, step, both = floors(b, model, NARROW, True), *(rows.get(WAYS[i][0]) for i in (2, 3))
    if not least or step is None:
        return ""
    products, tiles = least["products"].ms, idle(b, model, NARROW)["total"]
    others = least["total"].ms - products
    parts = {
        "products at the best rate": products,
        "all else at the measured bandwidth": others,
        "at least what tiles leave idle": tiles,
    }
    more = step.ms - sum(parts.values())
    parts |= {"what these rows do not explain": more} if more > 0 else {}
    named = [f"{what} ({time(ms)} ms, {ms / step.ms:.0%})" for what, ms in parts.items()]
    text = f" The {time(step.ms)} ms of {TITLES[model]} with 16-bit weights are {listed(named)}."
    whole, aim, update = hidden(b, model, NARROW), aimed(b, model), least["optimizer"].ms
    text += (
        f" The first two are its floor, {time(least['total'].ms)} ms, "
        f"{least['total'].ms / aim:.0%} of the target; with the optimizer wholly beside the "
        f"backward it would be {time(whole)} ms, {whole / aim:.0%}. For the target the overlap has "
        f"to hide {time(step.ms - aim)} ms, {(step.ms - aim) / update:.0%} of the least that the "
        f"optimizer takes"
    )
    if both is None:
        return f"{text}."
    hides = step.ms - both.ms
    return f"{text}; it hides {f'{time(hides)} ms' if hides > 0 else 'nothing'}."

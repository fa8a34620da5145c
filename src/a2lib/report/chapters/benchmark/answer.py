"""The first screen, the table of every size and context, and the ways of running a step."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from a2lib.report import figures, style
from a2lib.report.chapters.benchmark import updates
from a2lib.report.chapters.benchmark.estimate import floors
from a2lib.report.chapters.benchmark.rows import (
    AUTOCAST,
    CONFIGURATION,
    CONTEXT,
    CONTEXTS,
    MODELS,
    OURS,
    PHASES,
    PLAIN,
    TITLES,
    Benchmark,
    half,
)
from a2lib.report.chapters.measured import HOST, mean, time
from a2lib.report.metrics import pick
from a2lib.report.style import Chart, listed
from a2lib.report.tables import Markdown, Table

LOOSE = 0.02  # a relative deviation above this is named
MODES = ("forward", "forward-backward", "train-step", "overlapped-step")
WHY = {"oom": "out of memory", "unsupported": "not supported"}


def sentence(b: Benchmark) -> Markdown:
    """The answer, from the largest model that has a plain train-step at the usual context."""
    model = next((m for m in reversed(MODELS) if b.ms(m, CONTEXT)), None)
    if model is None:
        return Markdown(b.not_yet("the command and the estimate are below, the times will follow"))
    parts = {phase: b.ms(model, CONTEXT, phase) for phase in PHASES}
    wall = b.ms(model, CONTEXT)
    known = {phase: ms for phase, ms in parts.items() if ms is not None}
    told = [f"{phase} {_ms(ms)}" for phase, ms in known.items()]
    if "forward" in known and "backward" in known:
        times = known["backward"] / known["forward"]
        told[list(known).index("backward")] += f" ({times:.2f} times the forward)"
    text = (
        f"**The answer.** One train-step of the {TITLES[model]} model, {CONTEXT} tokens and a "
        f"batch of 4, takes {_ms(wall)} in plain fp32{': ' if told else ''}{', '.join(told)}."
    )
    best = b.ms(model, CONTEXT, way=OURS, capture=True)
    if best is None:
        return Markdown(f"{text} {b.not_yet('the same step in bf16, compiled and captured')}")
    return Markdown(
        f"{text} In bf16 with our attention, compiled block by block and replayed from one CUDA "
        f"graph, the same step takes {_ms(best)}, {_faster(wall, best)}."
        f"{_updated(b, model, best)}{_limits(b, model)}"
    )


def _updated(b: Benchmark, model: str, best: float) -> str:
    """The fastest way beyond that, if one is measured in the same run."""
    rows = updates.found(b, model)
    if len(rows) < 2:
        return ""
    name, row = min(rows.items(), key=lambda item: item[1].ms)
    if row.ms >= best:
        return ""
    words = {"AdamW overlapped": "With AdamW beside the backward",
             "16-bit weights": "With weights in 16 bits",
             "both": "With weights in 16 bits and AdamW beside the backward"}[name]  # fmt: skip
    return f" {words} it takes {_ms(row.ms)}."


def _limits(b: Benchmark, model: str) -> str:
    """What limits the captured step of that model, and of the smallest."""
    text, least = "", floors(b, model, "bf16", True)
    if least:
        text = (
            f" The captured step's kernels need at least {_ms(least['total'].ms)}: the GPU limits "
            "it."
        )
    called = b.ms(MODELS[0], CONTEXT, way=OURS)
    captured = b.ms(MODELS[0], CONTEXT, way=OURS, capture=True)
    if called and captured and called * HOST > captured:
        text += (
            f" The {TITLES[MODELS[0]]} model is limited by the host: launched kernel by kernel "
            f"that step takes {_ms(called)}, replayed {_ms(captured)}."
        )
    return text


def table(b: Benchmark, caption: str, name: str) -> Table:
    """Mean and deviation of each phase, of the whole step, and the peak of memory."""
    lines = []
    for model in MODELS:
        for context in CONTEXTS:
            found = [b.phase(model, context, phase) for phase in PHASES]
            wall = b.row(model, context)
            if any(row is not None for row in (*found, wall)):
                lines.append([TITLES[model], style.tokens(context), *map(mean, found), mean(wall),
                              _peak(wall)])  # fmt: skip
    columns = ["model", "tokens", *PHASES, "train-step", "peak, GB"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def spreads(b: Benchmark) -> Markdown:
    """How many of the plain phases spread by more than a little, and which most; and the ratio of
    backward to forward."""
    rows = pick(b.table, **PLAIN, capture=False, mode="train-step", status="ok")
    timed = rows[rows["phase"].isin(PHASES)]
    if not len(timed):
        return Markdown(b.not_yet("how far repeated steps differ"))
    relative = (timed["ms_std"].fillna(0) / timed["ms_mean"]).astype(float)
    worst = timed.loc[relative.idxmax()]
    wide = int((relative > LOOSE).sum())
    ratios = {(m, c): b.ms(m, c, "backward") / b.ms(m, c, "forward")
              for m in MODELS for c in CONTEXTS
              if b.ms(m, c, "forward") and b.ms(m, c, "backward")}  # fmt: skip
    text = (
        f"The standard deviation is above {LOOSE:.0%} of the mean in {wide} of {len(timed)} "
        f"phases; the widest is the {worst['phase']} of {TITLES[worst['model']]} at "
        f"{style.tokens(worst['context'])} tokens ({relative.max():.1%})."
    )
    if ratios:
        text += (
            f" By medians backward takes {style.between(ratios.values(), '{:.2f}'.format)} times "
            "its forward, where the products alone would make it two."
        )
    bound = [case for case in ratios if _host_bound(b, *case)]
    ahead = [ratio for case, ratio in ratios.items() if case not in bound]
    if bound and ahead:
        theirs = sum(bool(_host_bound(b, r.model, r.context))
                     for r in timed[relative > LOOSE].itertuples())  # fmt: skip
        text += (
            f" In {len(bound)} of these {len(ratios)} steps ("
            f"{listed([f'{TITLES[m]} at {style.tokens(c)}' for m, c in bound])}) the host takes "
            f"{HOST:.0%} of the forward's time or more: that time is the host's, and {theirs} of "
            f"the {wide} wide phases are in these steps. In the others backward takes "
            f"{style.between(ahead, '{:.2f}'.format)} times its forward."
        )
    return Markdown(text)


def spread(b: Benchmark) -> Chart:
    """Standard deviation over the mean of the plain phases, by model and context."""
    models = [m for m in MODELS if any(b.phase(m, c, p) is not None for c in CONTEXTS
                                       for p in PHASES)]  # fmt: skip
    maps = {}
    for title in (*PHASES, "train-step"):
        shares = pd.DataFrame(np.nan, index=models, columns=list(CONTEXTS))
        for model in models:
            for context in CONTEXTS:
                whole = title == "train-step"
                row = b.row(model, context) if whole else b.phase(model, context, title)
                if row is not None and row.status == "ok" and not pd.isna(row.ms_std):
                    shares.loc[model, context] = float(row.ms_std / row.ms_mean)
        maps[title] = shares.rename(index=TITLES, columns=style.tokens)
    return figures.spreads(maps, down="", across="tokens")


def _host_bound(b: Benchmark, model: str, context: int) -> bool:
    """Whether the time of a plain forward, with which a step begins, is the host's."""
    row = b.phase(model, int(context), "forward")
    known = row is not None and row.status == "ok" and not pd.isna(row.ms_host)
    return known and row.ms_host >= HOST * row.ms


def not_fitting(b: Benchmark) -> Markdown:
    """What has no time: a line for each model and reason; where others of its steps at that length
    have one, with the ways that have none."""
    if not len(b.table):
        return Markdown(b.not_yet("which configurations do not fit"))
    rows = b.table[b.table["status"] != "ok"]
    if not len(rows):
        return Markdown("Every configuration that was measured fits.")
    rows = rows.assign(why=[_why(r.status, r.note) for r in rows.itertuples()])
    lines = []
    for (model, why), group in rows.groupby(["model", "why"], sort=False):
        cases = []
        for modes, contexts in _cases(group):
            at = listed([style.tokens(c) for c in contexts])
            cases.append(f"{listed(modes)} at {at} tokens")
        n = len(group.drop_duplicates(CONFIGURATION))
        count = f" ({n} configurations)" if n > 1 else ""
        fits = pick(b.table, model=model, status="ok")
        if set(zip(fits["mode"], fits["context"], strict=True)) & set(
            zip(group["mode"], group["context"], strict=True)
        ):
            count = f" ({listed(list(dict.fromkeys(map(_way, group.itertuples()))))})"
        lines.append(f"- {TITLES.get(model, model)}, {'; '.join(cases)}{count}: {why}")
    return Markdown("\n".join(lines))


def _cases(rows: pd.DataFrame) -> list[tuple[list[str], list[int]]]:
    """(modes, contexts) of the rows; modes that have the same contexts together."""
    found: dict[tuple, list[str]] = {}
    for mode in (m for m in MODES if m in set(rows["mode"])):
        contexts = tuple(sorted({int(c) for c in rows[rows["mode"] == mode]["context"]}))
        found.setdefault(contexts, []).append(mode)
    return [(modes, list(contexts)) for contexts, modes in found.items()]


def _way(row) -> str:
    how = ["captured"] * bool(row.capture) + ["compiled"] * (row.compile != "none")
    return " ".join([*how, row.precision, "with", row.attention, "attention"])


def _why(status: str, note: str) -> str:
    """A stored reason without the figures of one attempt, which a process's state decides."""
    note = re.sub(r"^in warmup 0, (\w+): CUDA out of memory\b.*", r"in its first \1", note)
    note = re.sub(r"\bin capture: CUDA out of memory\b.*", "when captured", note)
    note = re.sub(r"(, \w+): CUDA out of memory\b.*", r"\1", note)
    return f"{WHY.get(status, status)} ({note})" if note else WHY.get(status, status)


def ways(b: Benchmark, caption: str, name: str) -> Table:
    """The train-step in each way: wall time, what the host needs to issue it, and the GPU's own
    time (the same step replayed from a CUDA graph)."""
    lines = []
    for model in MODELS:
        for context in CONTEXTS:
            plain, ours = _apart(b, model, context, PLAIN), _apart(b, model, context, OURS)
            autocast = b.ms(model, context, way=AUTOCAST)
            captured = b.ms(model, context, way=OURS, capture=True)
            if any(value is not None for value in (plain[2], *ours, autocast)):
                gain = plain[0] / captured if plain[0] and captured else None
                lines.append([TITLES[model], style.tokens(context), *map(time, plain),
                              time(autocast), *map(time, ours), time(captured),
                              "·" if gain is None else f"{gain:.2f}"])  # fmt: skip
    columns = ["model", "tokens", "fp32: wall", "host", "GPU", "bf16: wall", "ours: wall", "host ",
               "GPU ", "captured: wall", "gain"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def launch_bound(b: Benchmark) -> Markdown:
    """In how many plain and compiled steps the host takes longer than the GPU needs."""
    told = []
    ways_told = (("plain fp32", PLAIN), ("bf16 with our attention and compiled blocks", OURS))
    for title, way in ways_told:
        known = [(m, c, *_apart(b, m, c, way)[1:]) for m in MODELS for c in CONTEXTS]
        known = [line for line in known if line[2] and line[3]]
        held = [f"{TITLES[m]} at {style.tokens(c)}" for m, c, host, gpu in known if host > gpu]
        if known:
            which = f" ({listed(held)})" if held else ""
            told.append(f"in {len(held)} of {len(known)} train-steps of {title}{which}")
    if not told:
        return Markdown(b.not_yet("host time and GPU time apart"))
    text = f"The host needs longer to issue the step than the GPU to run it {listed(told)}."
    plain = [(m, c) for m in MODELS for c in CONTEXTS if b.ms(m, c)]
    lacking = [case for case in plain if b.row(*case, way=OURS, capture=True) is None]
    if lacking:
        what = f"{len(lacking)} of the {len(plain)} sizes and contexts whose step fits"
        text += f" {b.not_yet(f'the other ways of {what}')}"
    launched = b.table[(b.table["phase"] == "step") & ~b.table["capture"]]
    launched = launched[launched["mode"] == "train-step"]
    return Markdown(text + _commits(b) + half(launched, "launched train-steps"))


def _commits(b: Benchmark) -> str:
    """That compiled steps are of several commits, and which contexts each has."""
    rows = {(m, c): b.row(m, c, way=OURS) for m in MODELS for c in CONTEXTS}
    contexts: dict[str, set[int]] = {}
    for run, context in sorted((row.run, c) for (_, c), row in rows.items()
                               if row is not None and row.status == "ok"):  # fmt: skip
        contexts.setdefault(b.runs.loc[run, "git"], set()).add(context)
    if len(contexts) < 2:
        return ""
    told = [f"`{commit}` at {listed([style.tokens(c) for c in sorted(found)])}"
            for commit, found in contexts.items()]  # fmt: skip
    return (
        f" Compiled steps are of more than one commit, {listed(told)} tokens, so that along the "
        "contexts of a model code and machine may differ too."
    )


def _apart(b: Benchmark, model: str, context: int, way: dict) -> tuple:
    """(wall, host, GPU) in ms of a train-step; None for what is missing."""
    return (b.ms(model, context, way=way), b.host(model, context, way),
            b.ms(model, context, "step", way=way, capture=True))  # fmt: skip


def _peak(row) -> str:
    if row is None or row.status != "ok" or pd.isna(row.peak_bytes):
        return "·"
    return style.digits(float(row.peak_bytes) / 1e9)


def _ms(value: float) -> str:
    return f"{style.digits(value)} ms"


def _faster(before: float, after: float) -> str:
    if after > before:
        return f"{after / before:.2f} times as long"
    return f"{before / after:.2f} times as fast"

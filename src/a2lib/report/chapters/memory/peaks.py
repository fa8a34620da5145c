"""The peaks of every size and context: tables, what did not fit, and what is not measured."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import TITLES
from a2lib.report.chapters.memory.rows import (
    CONTEXTS,
    MODEL,
    MODELS,
    MODES,
    PRECISIONS,
    Memory,
    blocks,
    counted,
    gb,
    step,
)
from a2lib.report.tables import MISSING, Markdown, Table, folded
from a2lib.theory.step_memory import asked
from a2lib.theory.step_tensors import StepMemory

OTHERS = tuple(model for model in MODELS if model != MODEL)
ASKED = ("inference", "train-step")  # of the other sizes


def table(m: Memory, caption: str, name: str) -> Table:
    """The handouts' model by context and precision: a forward, one that is kept, a train-step with
    eager attention and with ours."""
    kinds = [(mode, "eager") for mode in MODES] + [("train-step", "flash")]
    lines = [
        [style.tokens(c), p, *(_peak(m, step(c, mode, p, attention)) for mode, attention in kinds)]
        for c in CONTEXTS
        for p in PRECISIONS
    ]
    columns = ["tokens", "", *(_named(*kind) for kind in kinds)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def others(m: Memory, mode: str, caption: str, name: str) -> Table:
    """The other sizes, a column for each context."""
    lines = [
        [TITLES[model], p, *(_peak(m, step(c, mode, p, model=model)) for c in CONTEXTS)]
        for model in OTHERS
        for p in PRECISIONS
    ]
    columns = ["model", "", *map(style.tokens, CONTEXTS)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def _peak(m: Memory, one: StepMemory) -> str:
    """What tensors and workspaces held at the peak, as measured; where nothing is, as counted."""
    row, count = m.row(one), gb(asked(one))
    if row is None:
        return f"*{count}*"
    if row.status != "ok":
        return f"{style.STATUS.get(row.status, row.status)} ({count})"
    return gb(row.tensor_bytes)


def _named(mode: str, attention: str) -> str:
    return MODES[mode] + (", ours" if attention == "flash" else "")


def not_measured(m: Memory) -> Markdown:
    """Which of the other sizes' steps nobody has measured yet, if any."""
    rest = []
    for model in OTHERS:
        steps = [step(c, mode, p, model=model)
                 for mode in ASKED for c in CONTEXTS for p in PRECISIONS]  # fmt: skip
        lacks = sum(m.row(one) is None for one in steps)
        if lacks:
            rest.append(f"{lacks} of {len(steps)} of {TITLES[model]}")
    return Markdown(m.not_yet(f"of these peaks {style.listed(rest)}") if rest else "")


def detail(m: Memory, precision: str, caption: str, name: str) -> Table:
    """The peak of the second step: counted, and by each of the allocator's counts."""
    lines = []
    kinds = [(mode, "eager") for mode in MODES]
    kinds += [("train-step", "flash")] if precision == "bf16" else []
    for context in CONTEXTS:
        for mode, attention in kinds:
            one = step(context, mode, precision, attention)
            lines.append([style.tokens(context), _named(mode, attention), gb(counted(one).total),
                          *_measured(m.row(one), one)])  # fmt: skip
    columns = ["tokens", "", "counted: tensors", "measured: tensors", "blocks", "reserved",
               "count off by"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def folded_detail(m: Memory, precision: str, caption: str, name: str) -> Markdown:
    title = f"{MODEL} in {precision}: tensors, their blocks, and memory reserved"
    return Markdown(folded(detail(m, precision, caption, name), title, longest=0))


def _measured(row, one: StepMemory) -> list[str]:
    if row is None:
        return [MISSING] * 4
    if row.status != "ok":
        return [style.STATUS.get(row.status, row.status), *[MISSING] * 3]
    off = MISSING
    if not pd.isna(row.allocated_bytes):
        off = style.signed(blocks(one).allocated / row.allocated_bytes - 1)
    return [gb(row.tensor_bytes), gb(row.allocated_bytes), gb(row.reserved_bytes), off]


def not_fitting(m: Memory) -> Markdown:
    """What did not fit, and whether the count says so."""
    rows = m.table[(m.table["phase"] == "step") & (m.table["status"] == "oom")]
    rows = rows[rows["step_number"] == 1]
    rows = rows.assign(place=rows["model"].map(MODELS.index)).sort_values(
        ["place", "context"], kind="stable"
    )
    if not len(m.table):
        every = [step(c, mode, p) for c in CONTEXTS for mode in MODES for p in PRECISIONS]
        over = [one for one in every if counted(one).total > m.capacity()]
        lines = [f"- {_name(one)}: {gb(counted(one).total)} GB" for one in over]
        text = "\n".join(["By the count these do not fit:", "", *lines, ""])
        return Markdown(f"{text}\n{m.not_yet('what does not fit')}")
    if not len(rows):
        return Markdown("Every configuration that was measured fits.")
    given = rows["note"].str.extract(r"total capacity of ([\d.]+) GiB")[0].dropna().astype(float)
    room = given.min() * 2**30 if len(given) else m.capacity()
    groups: dict[tuple, list[str]] = {}
    for row in rows.itertuples():
        one = step(row.context, row.mode, row.precision, row.attention, row.model)
        fits = ", which would fit" if asked(one) < room else ""
        size = f"{style.tokens(one.context)} tokens (counted {gb(counted(one).total)} GB{fits})"
        where = row.note.partition(": CUDA out of memory")[0]
        for number, word in enumerate(("first", "second")):
            where = where.replace(f"step {number}", f"the {word} step")
        groups.setdefault((row.model, *_how(one), where), []).append(size)
    of = ""
    if len(given):
        stated = f"the GPU's maker states {m.capacity() / 1e9:.0f}"
        of = f" of the {gb(room)} GB that the driver gives ({stated})"
    lines = [f"What ran out of memory{of}, and where:", ""]
    lines += [f"- {TITLES[model]}, {mode}, {how}: {style.listed(sizes)}: {why}"
              for (model, mode, how, why), sizes in groups.items()]  # fmt: skip
    return Markdown("\n".join(lines))


def _name(one: StepMemory) -> str:
    mode, how = _how(one)
    return f"{mode}, {style.tokens(one.context)} tokens, {how}"


def _how(one: StepMemory) -> tuple[str, str]:
    ours = ", our attention" if one.attention == "flash" else ""
    return MODES.get(one.mode, one.mode), f"{one.precision}{ours}"

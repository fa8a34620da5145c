"""The peaks of every size and context: tables, and what is not measured."""

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

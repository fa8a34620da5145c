"""The first step of a process beside the second, phase by phase."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.memory.rows import CONTEXTS, MODEL, SHOWN, Memory, counted, gb, step
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.step_memory import WORKSPACE
from a2lib.theory.transformer import SIZES, state_bytes

PHASES = ("forward", "loss", "backward", "optimizer")
LONGEST = CONTEXTS[-1]
# What the table has of both steps: where gradients and moments decide, where activations do.
SHOWN_STEPS = ((128, "fp32", "eager"), (512, "fp32", "eager"), (1024, "fp32", "eager"),
               (512, "bf16", "eager"), (2048, "bf16", "flash"))  # fmt: skip


def first_step(m: Memory) -> Markdown:
    """Why the first step peaks lower, where it does."""
    moments = state_bytes(SIZES[MODEL]).optimizer
    pairs = {c: tuple(counted(step(c, first=first)) for first in (True, False)) for c in CONTEXTS}
    same = [c for c, (one, later) in pairs.items() if later.total - one.total < WORKSPACE]
    one, later = pairs[SHOWN]
    text = (
        f"AdamW makes its moments, {gb(moments)} GB, in the first optimizer phase, and keeps them: "
        "from the second step on they lie under forward and backward too. The first step peaks in "
        f"{_during(one.phase)} at {SHOWN} tokens, with {gb(one.total)} GB, the second in "
        f"{_during(later.phase)}, with {gb(later.total)}; at {style.tokens(LONGEST)} tokens, where "
        f"both peak in {_during(pairs[LONGEST][1].phase)}, it is {gb(pairs[LONGEST][0].total)} and "
        f"{gb(pairs[LONGEST][1].total)}. "
    )
    if same:
        text += (
            f"At {style.listed([style.tokens(c) for c in same])} tokens both peak alike, where "
            "weights, gradients and moments are all there: the first in the optimizer's phase, the "
            "second where backward ends. "
        )
    text += "A measurement of the first step alone gives too little where activations decide."
    return Markdown(text + _risen(m))


def _during(phase: str) -> str:
    return "the optimizer's phase" if phase == "optimizer" else phase


def _risen(m: Memory) -> str:
    """By how much the backward of the second step is above the first's, as measured."""
    steps = m.table[(m.table["mode"] == "train-step") & (m.table["phase"] == "backward")
                    & (m.table["status"] == "ok") & (m.table["model"] == MODEL)]  # fmt: skip
    keys = ["context", "precision", "attention"]
    both = steps.pivot_table("tensor_bytes", keys, "step_number").reindex(columns=[0, 1]).dropna()
    if not len(both):
        return ""
    risen = (both[1] - both[0]).tolist()
    return (
        f" Measured, backward's peak rises from the first step to the second by "
        f"{style.between(risen, gb)} GB in {len(risen)} train-steps."
    )


def by_phase(m: Memory, caption: str, name: str) -> Table:
    """What tensors and workspaces hold at most in each phase of either step, as measured; the
    step's peak in bold."""
    lines = []
    for context, precision, attention in SHOWN_STEPS:
        for number in (0, 1):
            one = step(context, "train-step", precision, attention, first=number == 0)
            rows = [m.row(one, number, phase) for phase in PHASES]
            sizes = [int(row.tensor_bytes) if row is not None and row.status == "ok" else None
                     for row in rows]  # fmt: skip
            cells = [MISSING if size is None else gb(size) for size in sizes]
            if None not in sizes:
                at = sizes.index(max(sizes))
                cells[at] = f"**{cells[at]}**"
            ours = ", ours" if attention == "flash" else ""
            lines.append([style.tokens(context), precision + ours, number + 1, *cells])
    columns = ["tokens", "", "step", *PHASES]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def where(m: Memory) -> Markdown:
    """In which phase steps peak, and whether the GPU says the same."""
    phases = m.table[m.table["phase"] != "step"]
    keys = ["model", "context", "mode", "precision", "attention", "step_number"]
    right, later = [], []
    for key, rows in phases.groupby(keys, sort=False):
        if (rows["status"] != "ok").any():  # it ended before its peak
            continue
        model, context, mode, precision, attention, number = key
        one = step(int(context), mode, precision, attention, model, first=number == 0)
        seen = rows.loc[rows["tensor_bytes"].idxmax(), "phase"]
        right.append(seen == counted(one).phase)
        if mode == "train-step" and number == 1:
            later.append(seen == "backward")
    if not later:
        return Markdown("")
    return Markdown(
        f"Of {len(later)} train-steps after the first {sum(later)} peak in backward: where it ends "
        "if gradients outweigh what was saved, where it begins if not. The phase of the peak is "
        f"the counted one in {sum(right)} of {len(right)} steps, first ones and forwards included."
    )

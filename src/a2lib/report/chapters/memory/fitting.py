"""What ran out of memory, whether the count runs out there too; what the largest model needs."""

from __future__ import annotations

import re

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import TITLES
from a2lib.report.chapters.measured import UNIT, said_bytes
from a2lib.report.chapters.memory.rows import (
    BATCH,
    CONTEXTS,
    MODELS,
    MODES,
    PRECISIONS,
    Memory,
    counted,
    gb,
    step,
)
from a2lib.report.tables import MISSING, Markdown, Table, folded
from a2lib.theory.devices import DEVICES
from a2lib.theory.jobs import Job
from a2lib.theory.layouts import Layout, evaluate
from a2lib.theory.step_memory import Refusal, StepMemory, refused
from a2lib.theory.transformer import SIZES, parameter_count, state_bytes

LARGE = "10B"
ASKED = r"Tried to allocate ([\d.]+ \w+)\."
LEFT = "of which"
# What a step of the largest model could be done with: devices, how state is cut, what is kept, the
# optimizer.
WAYS = {
    "1 GPU, a checkpoint around each block": (1, "none", "block", "adamw"),
    "the same with AdamW's moments in 8 bits": (1, "none", "block", "adamw-8bit"),
    "2 GPUs, moments divided (ZeRO 1), checkpoints": (2, "zero1", "block", "adamw"),
    "2 GPUs, all state divided (FSDP)": (2, "fsdp", "none", "adamw"),
    "the same with checkpoints": (2, "fsdp", "block", "adamw"),
}


def refusals(m: Memory) -> pd.DataFrame:
    """The second steps that ran out of memory, as ``Memory.table`` has them, in order."""
    rows = m.table[(m.table["phase"] == "step") & (m.table["status"] == "oom")]
    rows = rows[rows["step_number"] == 1]
    rows = rows.assign(place=rows["model"].map(MODELS.index))
    keys = ["place", "mode", "attention", "precision", "context"]
    return rows.sort_values(keys, kind="stable")


def beside(m: Memory) -> float:
    """Bytes that the driver counts beside the allocator's: median over the steps that fit."""
    rows = m.table[m.table["phase"] == "step"].dropna(subset=["driver_bytes", "reserved_bytes"])
    return float((rows["driver_bytes"] - rows["reserved_bytes"]).median())


def _of(row) -> StepMemory:
    return step(row.context, row.mode, row.precision, row.attention, row.model)


def _counted(m: Memory, row) -> Refusal | None:
    """Where the count runs out of what the driver leaves to the allocator."""
    return refused(_of(row), int(_there(m)))


def _left(m: Memory, found: Refusal) -> float:
    """MiB that the device had left by then, by the count."""
    return (_there(m) - found.reserved) / UNIT["MiB"]


def _asked(size: int) -> str:
    """As PyTorch's message writes a size."""
    unit = "GiB" if size > 2**30 else "MiB"
    return f"{size / UNIT[unit]:.2f} {unit}"


def _where(row) -> str:
    """In which phase it was, by the note; of the first step if none is named."""
    where = row.note.partition(": CUDA out of memory")[0].removeprefix("in ")
    return where.replace("step 0, ", "").replace("step 1, ", "second step's ")


def _told(found: Refusal) -> str:
    return f"second step's {found.phase}" if found.number else found.phase


def not_fitting(m: Memory) -> Markdown:
    """What did not fit, and whether the count runs out where the GPU did."""
    if not len(m.table):
        every = [step(c, mode, p) for c in CONTEXTS for mode in MODES for p in PRECISIONS]
        over = [one for one in every if counted(one).total > m.capacity()]
        lines = [f"- {_name(one)}: {gb(counted(one).total)} GB" for one in over]
        text = "\n".join(["By the count these do not fit:", "", *lines, ""])
        return Markdown(f"{text}\n{m.not_yet('what does not fit')}")
    rows = refusals(m)
    if not len(rows):
        return Markdown("Every configuration that was measured fits.")
    many = f"{len(rows)} configurations" if len(rows) > 1 else "One configuration"
    if m.given() is None or pd.isna(beside(m)):
        return Markdown(f"{many} ran out of memory.")
    text = (
        f"{many} ran out of the {gb(m.given())} GB that the driver gives (the GPU's maker states "
        f"{m.sheet('memory'):.0f}). It counts {gb(beside(m))} GB of them beside the allocator's. "
        "Where the counted allocator has the rest for its capacity, it is refused a segment of the "
        "same size in the same phase of the same step "
    )
    pairs = [(row, _counted(m, row)) for row in rows.itertuples()]
    same = [(row, found) for row, found in pairs if _same(row, found)]
    text += f"in {len(same)} of {len(rows)}"
    left = [abs(said_bytes(LEFT, row.note) / UNIT["MiB"] - _left(m, found))
            for row, found in same if said_bytes(LEFT, row.note)]  # fmt: skip
    if left:
        text += f", with what was left on the device off by {max(left):.0f} MiB at most"
    text += ". "
    if same:
        idle = style.between([found.reserved - found.allocated for _, found in same], gb)
        text += (
            f"By then {idle} GB of what it had taken were free by the count, in pieces too small "
            "for it: so much is lost to fragmentation."
        )
    return Markdown(text.strip())


def _same(row, found: Refusal | None) -> bool:
    asked = re.search(ASKED, row.note)
    return found is not None and asked is not None and (
        (_told(found), _asked(found.wanted)) == (_where(row), asked[1])
    )  # fmt: skip


def folded_table(m: Memory, caption: str, name: str) -> Markdown:
    """``table``, folded away; nothing where the notes do not say what the driver gives."""
    if m.given() is None or pd.isna(beside(m)):
        return Markdown("")
    return Markdown(folded(table(m, caption, name), "Where each ran out of memory", longest=0))


def table(m: Memory, caption: str, name: str) -> Table:
    """Each of them: where it ran out, what it asked for, what the device had left; in brackets
    where the count runs out, if that is elsewhere."""
    lines = []
    for row in refusals(m).itertuples():
        one, found, asked = _of(row), _counted(m, row), re.search(ASKED, row.note)
        where = _where(row)
        if not _same(row, found):
            where += f" ({'fits' if found is None else f'{_told(found)}, {_asked(found.wanted)}'})"
        mode, how = _how(one)
        left, count = said_bytes(LEFT, row.note), MISSING
        if found is not None:
            count = f"{_left(m, found):,.0f}"
        seen = MISSING if left is None else f"{left / UNIT['MiB']:,.0f}"
        lines.append([TITLES[row.model], f"{mode}, {how}", style.tokens(one.context), where,
                      asked[1] if asked else MISSING, seen, count])  # fmt: skip
    columns = ["model", "", "tokens", "ran out in", "asking for", "MiB left", "by the count"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=3, keys=3)


def _name(one: StepMemory) -> str:
    mode, how = _how(one)
    return f"{mode}, {style.tokens(one.context)} tokens, {how}"


def _how(one: StepMemory) -> tuple[str, str]:
    ours = ", our attention" if one.attention == "flash" else ""
    return MODES.get(one.mode, one.mode), f"{one.precision}{ours}"


def largest(m: Memory) -> Markdown:
    """What does not help the largest model, whose state alone is too large."""
    n, state = parameter_count(SIZES[LARGE]), state_bytes(SIZES[LARGE])
    there = _there(m)
    rest = state.parameters + state.optimizer
    text = (
        f"Of the {LARGE} model weights, gradients and moments are {state.total // n} bytes a "
        f"parameter, {gb(state.total)} GB, so that no train-step fits one GPU whatever is kept of "
        "the forward. Weights and gradients in bf16 with fp32 masters (2 + 2 + 4 + 8 bytes) are as "
        f"many. AdamW beside the backward drops each gradient once it is used; {gb(rest)} GB of "
        f"weights and moments stay, {'too many as well' if rest > there else 'which fit'}. "
    )
    return Markdown(
        f"{text}{{numref}}`tab-memory-ways` is what would fit, by [the planner]"
        "(parallelism-axes.md); it is not measured."
    )


def _there(m: Memory) -> float:
    """Bytes for the allocator of one GPU: as its driver gives them, else as its maker says."""
    given = m.given()
    return m.capacity() if given is None or pd.isna(beside(m)) else given - beside(m)


def ways(m: Memory, caption: str, name: str) -> Table:
    """Bytes of one GPU by way and context, the more of both precisions; what fits in bold."""
    lines = []
    for way, (devices, sharding, kept, optimizer) in WAYS.items():
        cells = [_most(c, devices, sharding, kept, optimizer) for c in CONTEXTS]
        lines.append([way, *(f"**{gb(x)}**" if x < _there(m) else gb(x) for x in cells)])
    columns = ["", *map(style.tokens, CONTEXTS)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def _most(context: int, devices: int, sharding: str, kept: str, optimizer: str) -> float:
    layout = Layout(data=devices, sharding=sharding, checkpointing=kept)
    return max(
        evaluate(Job(SIZES[LARGE], DEVICES["H200"], devices, BATCH, context, 0.0, precision,
                     "eager", optimizer), layout).memory_bytes
        for precision in PRECISIONS
    )  # fmt: skip

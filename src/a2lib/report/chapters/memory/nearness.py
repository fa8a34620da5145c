"""How near the counts come to what the GPU says, and what the tensors alone leave out."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import TITLES
from a2lib.report.chapters.memory.rows import (
    MODEL,
    SHOWN,
    Memory,
    blocks,
    counted,
    gb,
    step,
)
from a2lib.report.tables import Markdown
from a2lib.theory.allocator import Allocator
from a2lib.theory.devices import DEVICES
from a2lib.theory.jobs import Job
from a2lib.theory.layouts import Layout, evaluate
from a2lib.theory.step_memory import WORKSPACE, StepMemory, asked

AIM, PLAN_AIM = 0.03, 0.05  # how near the count and the planner should come
BENCH = "train-steps of [the benchmark](benchmark.md)"


def nearness(m: Memory) -> Markdown:
    """How far the count of blocks is from what the GPU counted, over all steps there are."""
    told = []
    for where, off in (("steps of this chapter", _off(m)), (BENCH, _off_benchmark(m))):
        if off:
            worst = max(abs(x) for x in off)
            aim = "" if worst <= AIM else f", more than the {AIM:.0%} that it should"
            told.append(f"{len(off)} {where} to within {100 * worst:.2g}%{aim}")
    if not told:
        return Markdown(m.not_yet("how near this count comes"))
    peaks = " and of ".join(told)
    text = f"The count, tensor by tensor and block by block, gives the peak of {peaks}."
    if not _off(m):
        return Markdown(f"{text} {m.not_yet('the peaks of this chapter')}")
    exact = [int(row.tensor_bytes) == asked(_of(row)) for row in _steps(m).itertuples()]
    return Markdown(
        f"{text} Tensors and cuBLAS's workspaces are, to the byte, those that the GPU counted in "
        f"{sum(exact)} of {len(exact)} steps."
    )


def _of(row) -> StepMemory:
    return step(row.context, row.mode, row.precision, row.attention, row.model,
                first=int(row.step_number) == 0)  # fmt: skip


def _off(m: Memory) -> list[float]:
    """Relative differences of counted blocks from measured ones."""
    found = []
    for row in _steps(m).itertuples():
        taken = blocks(_of(row), int(row.step_number) + 1).allocated
        found.append(taken / int(row.allocated_bytes) - 1)
    return found


def _off_benchmark(m: Memory) -> list[float]:
    rows = m.bench[m.bench["mode"] == "train-step"].dropna(subset=["peak_bytes"])
    return [
        blocks(step(r.context, r.mode, model=r.model)).allocated / int(r.peak_bytes) - 1
        for r in rows.itertuples()
    ]


def planner(m: Memory) -> Markdown:
    """How near the planner's few terms come to the peaks of the second steps of one GPU."""
    here, there = [], []
    for row in _steps(m).itertuples():
        if row.mode == "train-step" and row.step_number == 1:
            here.append((_of(row), row.model, int(row.allocated_bytes)))
    for row in m.bench[m.bench["mode"] == "train-step"].dropna(subset=["peak_bytes"]).itertuples():
        one = step(row.context, row.mode, model=row.model)
        there.append((one, row.model, int(row.peak_bytes)))
    told, beyond = [], []
    for where, rows in (("train-steps of this chapter", here), (BENCH, there)):
        if rows:
            off = [_planned(one) / measured - 1 for one, _, measured in rows]
            told.append(f"{len(off)} {where} to within {max(map(abs, off)):.1%}")
            beyond += [(x, *row) for x, row in zip(off, rows, strict=True) if abs(x) > PLAN_AIM]
    if not told:
        return Markdown(m.not_yet("how near the planner comes"))
    text = (
        "[The planner](parallelism-axes.md), whose few terms know neither blocks nor workspaces, "
        f"gives the peaks of {' and of '.join(told)}."
    )
    if beyond:
        worst = [
            f"{TITLES[model]} at {style.tokens(one.context)} tokens ({style.signed(x, 1)}; the "
            f"workspaces are {2 * WORKSPACE / measured:.1%} of its {gb(measured)} GB)"
            for x, one, model, measured in beyond
        ]
        text += f" More than {PLAN_AIM:.0%} off: {style.listed(worst)}."
    return Markdown(text)


def _planned(one: StepMemory) -> float:
    job = Job(one.shape, DEVICES["H200"], 1, one.batch, one.context, 0.0, one.precision,
              one.attention)  # fmt: skip
    return evaluate(job, Layout(sharding="none")).memory_bytes


def _steps(m: Memory) -> pd.DataFrame:
    return m.table[m.table["phase"] == "step"].dropna(subset=["allocated_bytes"])


def levels(m: Memory) -> Markdown:
    """From tensors to what the driver counts, of the step whose timelines are drawn."""
    one, row = step(SHOWN), m.row(step(SHOWN))
    tensors, taken = counted(one).total, blocks(one)
    rest, idle = taken.allocated - tensors, taken.reserved - taken.allocated
    text = (
        f"In the train-step of {MODEL} at {SHOWN} tokens in fp32 tensors are {gb(tensors)} GB at "
        f"the peak and blocks {gb(taken.allocated)} GB: {rest / 2**20:.0f} MiB more, of which "
        f"cuBLAS's two workspaces are {2 * WORKSPACE // 2**20}. The rest are ends of blocks: "
        "the allocator takes memory from the device in steps of 2 MiB, and of a block it splits "
        "off what is larger than 1 MiB, so that a matrix of "
        f"{one.size('DD') / 2**20:.0f} MiB holds {_held(one.size('DD'))} MiB for good. From the "
        f"device it has {gb(taken.reserved)} GB by the count, {gb(idle)} GB of which lie in blocks "
        "that were free at that moment."
    )
    if row is None or row.status != "ok":
        return Markdown(f"{text} {m.not_yet('what it reserves, and what the driver says')}")
    return Markdown(
        f"{text} Measured: {gb(row.tensor_bytes)} GB of tensors and workspaces, "
        f"{gb(row.allocated_bytes)} GB of blocks, {gb(row.reserved_bytes)} GB from the device; the "
        f"driver counts {gb(row.driver_bytes)} GB, with the CUDA context and the kernels. "
        f"{reserved(m)}"
    )


def reserved(m: Memory) -> str:
    """What is reserved beyond the blocks, over all steps, and how near the count comes to it."""
    rows = _steps(m).dropna(subset=["reserved_bytes"])
    more, off = [], {}
    for row in rows.itertuples():
        more.append(int(row.reserved_bytes) / int(row.allocated_bytes) - 1)
        found = blocks(_of(row), int(row.step_number) + 1).reserved
        off[row.Index] = found / int(row.reserved_bytes) - 1
    near = sum(abs(x) <= AIM for x in off.values())
    text = (
        f"Over all {len(rows)} steps what is reserved is {style.between(more, _percent)} more than "
        f"the blocks of the peak, and the counted one within {AIM:.0%} of it in {near}"
    )
    if near == len(rows):
        return f"{text}."
    worst = max(off, key=lambda index: abs(off[index]))
    row = rows.loc[worst]
    return (
        f"{text}. The farthest ({style.signed(off[worst], 0)}) is {TITLES[row['model']]} at "
        f"{style.tokens(row['context'])} tokens, {row['mode']} in {row['precision']}: of equal "
        "free blocks PyTorch takes the one of the lowest address, and where the device puts a "
        "segment the count does not know."
    )


def _percent(x: float) -> str:
    return f"{x:.1%}"


def _held(size: int) -> int:
    device = Allocator(2**62)
    device.allocate("x", size)
    return device.allocated // 2**20

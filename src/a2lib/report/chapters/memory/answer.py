"""The first screen, the peaks of every context, and how near the count comes to them."""

from __future__ import annotations

import pandas as pd
from matplotlib.patches import Patch

from a2lib.report import style
from a2lib.report.chapters import profile
from a2lib.report.chapters.benchmark.rows import TITLES
from a2lib.report.chapters.memory.rows import (
    CONTEXTS,
    MODEL,
    MODELS,
    MODES,
    PRECISIONS,
    SHOWN,
    Memory,
    blocks,
    counted,
    gb,
    step,
)
from a2lib.report.style import Chart
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.step_memory import WORKSPACE, asked
from a2lib.theory.step_tensors import CATEGORIES, GRADIENTS, SAVED, StepMemory
from a2lib.theory.transformer import SIZES, state_bytes

AIM = 0.03  # how near the count should come


def sentence(m: Memory) -> Markdown:
    """What a step takes, when it peaks where, and what bf16 does to it."""
    state, capacity = state_bytes(SIZES[MODEL]), m.capacity()
    plain = {c: counted(step(c)) for c in CONTEXTS}
    level = [c for c in CONTEXTS if plain[c].by_category[GRADIENTS] > 0.9 * state.gradients]
    above = [c for c in CONTEXTS if c not in level]
    largest, longest = CONTEXTS[-1], plain[CONTEXTS[-1]]
    narrow = {c: counted(step(c, precision="bf16")) for c in CONTEXTS}
    more = [c for c in CONTEXTS if narrow[c].total > plain[c].total]
    flash = counted(step(largest, precision="bf16", attention="flash"))
    text = (
        f"**The answer.** When the backward of the {MODEL} model ends, {gb(state.total)} GB are "
        f"there in any case: weights, gradients and AdamW's two moments, {gb(state.parameters)} GB "
        "each. "
    )
    if level:
        at = style.listed([style.tokens(c) for c in level])
        text += (
            f"At {at} tokens that is the peak of a train-step in fp32 "
            f"({gb(plain[level[-1]].total)} GB), and the context does not matter. "
        )
    if above:
        text += (
            f"From {style.tokens(above[0])} tokens on the peak is where backward begins, with all "
            f"that forward has saved: {gb(plain[above[0]].total)} GB, of which "
            f"{gb(plain[above[0]].by_category[SAVED])} GB are saved; at "
            f"{style.tokens(largest)} tokens {gb(longest.total)} GB, which "
            f"{_fits(longest.total, capacity)}. "
        )
    where = "every one" if len(more) == len(CONTEXTS) else f"{len(more)}"
    text += (
        f"Autocast to bf16 raises the peak in {where} of {len(CONTEXTS)} contexts "
        f"({gb(narrow[largest].total)} GB at {style.tokens(largest)} tokens): weights and moments "
        "stay fp32, each matrix is kept a second time in bf16, and the softmax, in fp32, keeps its "
        "result and a bf16 copy of it. What removes the memory is attention without scores: with "
        f"ours, in bf16, {gb(flash.total)} GB."
    )
    return Markdown(text)


def _fits(size: float, capacity: int) -> str:
    return "fits" if size < capacity else f"does not fit the {capacity / 1e9:.0f} GB of the GPU"


def nearness(m: Memory) -> Markdown:
    """How far the count of blocks is from what the GPU counted, over all steps there are."""
    told = []
    bench = "train-steps of [the benchmark](benchmark.md)"
    for where, off in (("steps of this chapter", _off(m)), (bench, _off_benchmark(m))):
        if off:
            worst = max(abs(x) for x in off)
            aim = "" if worst <= AIM else f", more than the {AIM:.0%} that it should"
            told.append(f"{len(off)} {where} to within {100 * worst:.2g} %{aim}")
    if not told:
        return Markdown(m.not_yet("how near this count comes"))
    peaks = " and of ".join(told)
    text = f"The count, tensor by tensor and block by block, gives the peak of {peaks}."
    return Markdown(text if _off(m) else f"{text} {m.not_yet('the peaks of this chapter')}")


def _off(m: Memory) -> list[float]:
    """Relative differences of counted blocks from measured ones."""
    found = []
    for row in m.table[m.table["phase"] == "step"].dropna(subset=["allocated_bytes"]).itertuples():
        number = int(row.step_number)
        one = step(row.context, row.mode, row.precision, row.attention, row.model, number == 0)
        found.append(blocks(one, number + 1).allocated / int(row.allocated_bytes) - 1)
    return found


def _off_benchmark(m: Memory) -> list[float]:
    rows = m.bench[m.bench["mode"] == "train-step"].dropna(subset=["peak_bytes"])
    return [
        blocks(step(r.context, r.mode, model=r.model)).allocated / int(r.peak_bytes) - 1
        for r in rows.itertuples()
    ]


def missing(m: Memory) -> Markdown:
    """What the tensors alone leave out, of the step whose timelines are drawn."""
    one = step(SHOWN)
    tensors, taken = counted(one).total, blocks(one)
    rest = taken.allocated - tensors
    text = (
        f"Of that step at {SHOWN} tokens the tensors are {gb(tensors)} GB at the peak, their "
        f"blocks {gb(taken.allocated)} GB: {rest / 2**20:.0f} MiB more, of which cuBLAS's two "
        f"workspaces are {2 * WORKSPACE // 2**20}. The rest are ends of blocks: the allocator "
        "takes memory from the device in steps of 2 MiB, and of a block it splits off what is "
        "larger than 1 MiB, so that a matrix of "
        f"{one.size('DD') / 2**20:.0f} MiB holds {_held(one.size('DD'))} MiB for good. From the "
        f"device it has {gb(taken.reserved)} GB, {gb(taken.reserved - taken.allocated)} GB of "
        "which lie in blocks that were free at that moment."
    )
    return Markdown(text)


def _held(size: int) -> int:
    from a2lib.theory.allocator import Allocator

    device = Allocator(2**62)
    device.allocate("x", size)
    return device.allocated // 2**20


def peaks(m: Memory) -> Chart:
    """Bytes by category at the peak of each mode and context, as counted, in either precision; a
    mark where the GPU's own count of tensors lies."""
    names = CATEGORIES
    capacity = m.capacity() / 1e9

    def draw(figure):
        axes = figure.subplots(len(PRECISIONS), 1, sharex=True, sharey=True)
        for ax, precision in zip(axes, PRECISIONS, strict=True):
            places = []
            for at, context in enumerate(CONTEXTS):
                for offset, mode in zip((-0.27, 0, 0.27), MODES, strict=True):
                    one, bottom = step(context, mode, precision), 0.0
                    for name in names:
                        size = counted(one).by_category[name] / 1e9
                        ax.bar(at + offset, size, 0.23, bottom, linewidth=0,
                               color=profile.CATEGORIES[name])  # fmt: skip
                        bottom += size
                    row = m.row(one)
                    if row is not None and row.status == "ok":
                        places.append((at + offset, row.tensor_bytes / 1e9, "_"))
                    elif row is not None:
                        places.append((at + offset, bottom + 9, "x"))
            for x, y, marker in places:
                ax.plot([x], [y], marker=marker, color=style.INK, markersize=8, linestyle="")
            ax.axhline(capacity, color=style.INK, linestyle="--", linewidth=1)
            ax.set_title(precision, loc="left")
            ax.set_ylabel("GB")
            ax.grid(axis="x", visible=False)
        axes[0].annotate(f"{capacity:.0f} GB", (-0.42, capacity + 4))
        axes[-1].set_xticks(range(len(CONTEXTS)), [style.tokens(c) for c in CONTEXTS])
        axes[-1].set_xlabel("tokens (each: forward, forward kept, train-step)")
        handles = [Patch(color=profile.CATEGORIES[n], label=n, linewidth=0) for n in names]
        figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False,
                      columnspacing=1.0, handlelength=1.0, handletextpad=0.5)  # fmt: skip

    return Chart(draw, height=5.2)


def table(m: Memory, precision: str, caption: str, name: str) -> Table:
    """The peak of the second step: counted, and by each of the allocator's counts."""
    lines = []
    kinds = [(mode, "eager") for mode in MODES]
    kinds += [("train-step", "flash")] if precision == "bf16" else []
    for context in CONTEXTS:
        for mode, attention in kinds:
            one = step(context, mode, precision, attention)
            found, taken = counted(one), blocks(one)
            ours = ", our attention" if attention == "flash" else ""
            lines.append([style.tokens(context), MODES[mode] + ours, found.phase, gb(found.total),
                          gb(taken.allocated), *_measured(m.row(one), taken)])  # fmt: skip
    columns = ["tokens", "", "peak in", "counted: tensors", "blocks", "measured: tensors",
               "blocks ", "reserved", "count off by"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=3, keys=2)


def _measured(row, taken) -> list[str]:
    if row is None:
        return [MISSING] * 4
    if row.status != "ok":
        return [style.STATUS.get(row.status, row.status), *[MISSING] * 3]
    off = MISSING
    if not pd.isna(row.allocated_bytes):
        off = f"{taken.allocated / row.allocated_bytes - 1:+.2%}"
    return [gb(row.tensor_bytes), gb(row.allocated_bytes), gb(row.reserved_bytes), off]


def sizes(m: Memory, caption: str, name: str) -> Table:
    """Forward and train-step of every size at one context: what the allocator is asked for, counted
    and measured."""
    lines = []
    for model in MODELS:
        cells = []
        for precision in PRECISIONS:
            for mode in ("inference", "train-step"):
                one = step(SHOWN, mode, precision, model=model)
                row = m.row(one)
                seen = MISSING if row is None else style.STATUS.get(row.status, row.status)
                if row is not None and row.status == "ok":
                    seen = gb(row.tensor_bytes)
                cells += [gb(asked(one)), seen]
        lines.append([TITLES[model], *cells])
    heads = ["forward", "measured", "train-step", "measured "]
    columns = ["model", f"fp32: {heads[0]}", *heads[1:], f"bf16: {heads[0]}",
               *(f"{head}  " for head in heads[1:])]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def not_fitting(m: Memory) -> Markdown:
    """What did not fit, and whether the count says so."""
    rows = m.table[(m.table["phase"] == "step") & (m.table["status"] == "oom")]
    rows = rows[rows["step_number"] == 1]
    if not len(m.table):
        over = [one for one in _everything() if counted(one).total > m.capacity()]
        lines = [f"- {_name(one)}: {gb(counted(one).total)} GB" for one in over]
        text = "\n".join(["By the count these do not fit:", "", *lines, ""])
        return Markdown(f"{text}\n{m.not_yet('what does not fit')}")
    if not len(rows):
        return Markdown("Every configuration that was measured fits.")
    lines = []
    for row in rows.itertuples():
        one = step(row.context, row.mode, row.precision, row.attention, row.model)
        size = gb(counted(one).total)
        lines.append(f"- {row.model}, {_name(one)}: counted {size} GB; {row.note}")
    return Markdown("\n".join(lines))


def _everything() -> list[StepMemory]:
    return [step(c, mode, p) for c in CONTEXTS for mode in MODES for p in PRECISIONS]


def _name(one: StepMemory) -> str:
    return f"{MODES.get(one.mode, one.mode)}, {style.tokens(one.context)} tokens, {one.precision}"


def levels(m: Memory) -> Markdown:
    """The four counts of one step, from tensors to the driver's."""
    row = m.row(step(SHOWN))
    if row is None or row.status != "ok":
        return Markdown(m.not_yet("what the allocator reserves and what the driver says"))
    return Markdown(
        f"At the peak of the train-step at {SHOWN} tokens tensors and workspaces held "
        f"{gb(row.tensor_bytes)} GB, the allocator's blocks {gb(row.allocated_bytes)} GB; it had "
        f"{gb(row.reserved_bytes)} GB from the device ({gb(blocks(step(SHOWN)).reserved)} by the "
        f"count), and the driver counted {gb(row.driver_bytes)} GB, with the CUDA context and the "
        "kernels."
    )


def _during(phase: str) -> str:
    return "the optimizer's phase" if phase == "optimizer" else phase


def first_step(m: Memory) -> Markdown:
    """The first step beside the second."""
    told = []
    for context in (CONTEXTS[0], SHOWN, CONTEXTS[-1]):
        one, later = (counted(step(context, first=first)) for first in (True, False))
        told.append(f"{gb(one.total)} and {gb(later.total)} GB at {style.tokens(context)} tokens "
                    f"(in {_during(one.phase)} and in {_during(later.phase)})")  # fmt: skip
    moments = state_bytes(SIZES[MODEL]).optimizer
    text = (
        f"AdamW makes its moments, {gb(moments)} GB, in the first optimizer phase. The first step "
        f"therefore peaks lower where activations decide: {style.listed(told)}. A measurement of "
        "the first step alone gives too little."
    )
    rows = [m.row(step(SHOWN), number) for number in (0, 1)]
    if all(row is not None and row.status == "ok" for row in rows):
        text += (f" Measured at {SHOWN} tokens: {gb(rows[0].tensor_bytes)} and "
                 f"{gb(rows[1].tensor_bytes)} GB.")  # fmt: skip
    return Markdown(text)

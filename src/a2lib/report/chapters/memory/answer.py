"""The first screen, and the peaks of every context and size."""

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
from a2lib.theory.step_memory import asked
from a2lib.theory.step_tensors import CATEGORIES, GRADIENTS, SAVED, StepMemory
from a2lib.theory.transformer import SIZES, state_bytes


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
        f"ours, in bf16, it is {gb(flash.total)} GB at {style.tokens(largest)} tokens."
    )
    return Markdown(text)


def _fits(size: float, capacity: int) -> str:
    return "fits" if size < capacity else f"does not fit the {capacity / 1e9:.0f} GB of the GPU"


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
            ours = ", ours" if attention == "flash" else ""
            lines.append([style.tokens(context), MODES[mode] + ours, gb(counted(one).total),
                          *_measured(m.row(one), one)])  # fmt: skip
    columns = ["tokens", "", "counted: tensors", "measured: tensors", "blocks", "reserved",
               "count off by"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def _measured(row, one: StepMemory) -> list[str]:
    if row is None:
        return [MISSING] * 4
    if row.status != "ok":
        return [style.STATUS.get(row.status, row.status), *[MISSING] * 3]
    off = MISSING
    if not pd.isna(row.allocated_bytes):
        off = style.signed(blocks(one).allocated / row.allocated_bytes - 1)
    return [gb(row.tensor_bytes), gb(row.allocated_bytes), gb(row.reserved_bytes), off]


def sizes(m: Memory, caption: str, name: str) -> Table:
    """Forward and train-step of every size at one context: what the allocator is asked for, counted
    and measured."""
    lines = []
    for model in MODELS:
        for precision in PRECISIONS:
            cells = []
            for one in _of_size(model, precision):
                row = m.row(one)
                seen = MISSING if row is None else style.STATUS.get(row.status, row.status)
                if row is not None and row.status == "ok":
                    seen = gb(row.tensor_bytes)
                cells += [gb(asked(one)), seen]
            lines.append([TITLES[model], precision, *cells])
    columns = ["model", "", "forward: counted", "measured", "train-step: counted", "measured "]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def _of_size(model: str, precision: str) -> list[StepMemory]:
    return [step(SHOWN, mode, precision, model=model) for mode in ("inference", "train-step")]


def sizes_missing(m: Memory) -> Markdown:
    """Which sizes are not measured, if any."""
    rest = [
        TITLES[model]
        for model in MODELS
        if any(m.row(one) is None for p in PRECISIONS for one in _of_size(model, p))
    ]
    return Markdown(m.not_yet(f"here the peaks of {style.listed(rest)}") if rest else "")


def not_fitting(m: Memory) -> Markdown:
    """What did not fit, and whether the count says so."""
    rows = m.table[(m.table["phase"] == "step") & (m.table["status"] == "oom")]
    rows = rows[rows["step_number"] == 1]
    rows = rows.assign(place=rows["model"].map(MODELS.index)).sort_values(
        ["place", "context"], kind="stable"
    )
    if not len(m.table):
        over = [one for one in _everything() if counted(one).total > m.capacity()]
        lines = [f"- {_name(one)}: {gb(counted(one).total)} GB" for one in over]
        text = "\n".join(["By the count these do not fit:", "", *lines, ""])
        return Markdown(f"{text}\n{m.not_yet('what does not fit')}")
    if not len(rows):
        return Markdown("Every configuration that was measured fits.")
    groups: dict[tuple, list[str]] = {}
    for row in rows.itertuples():
        one = step(row.context, row.mode, row.precision, row.attention, row.model)
        fits = ", which would fit" if asked(one) < m.capacity() else ""
        size = f"{style.tokens(one.context)} tokens (counted {gb(counted(one).total)} GB{fits})"
        where = row.note.partition(": CUDA out of memory")[0]
        for number, word in enumerate(("first", "second")):
            where = where.replace(f"step {number}", f"the {word} step")
        groups.setdefault((row.model, *_how(one), where), []).append(size)
    given = rows["note"].str.extract(r"total capacity of ([\d.]+) GiB")[0].dropna().astype(float)
    of = f" of the {gb(given.min() * 2**30)} GB that the driver gives" if len(given) else ""
    lines = [f"What ran out of memory{of}, and where:", ""]
    lines += [f"- {model}, {mode}, {how}: {style.listed(sizes)}: {why}"
              for (model, mode, how, why), sizes in groups.items()]  # fmt: skip
    return Markdown("\n".join(lines))


def _everything() -> list[StepMemory]:
    return [step(c, mode, p) for c in CONTEXTS for mode in MODES for p in PRECISIONS]


def _name(one: StepMemory) -> str:
    mode, how = _how(one)
    return f"{mode}, {style.tokens(one.context)} tokens, {how}"


def _how(one: StepMemory) -> tuple[str, str]:
    ours = ", our attention" if one.attention == "flash" else ""
    return MODES.get(one.mode, one.mode), f"{one.precision}{ours}"

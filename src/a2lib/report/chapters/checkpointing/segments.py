"""The best segment, every strategy beside what is predicted of it, and where a block is highest."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.checkpointing.rows import (
    BATCH,
    CONTEXT,
    GRADIENTS,
    LAYERS,
    MODEL,
    NARROW,
    SEGMENTS,
    SHAPE,
    STRATEGIES,
    TITLES,
    WIDE,
    Checkpointing,
    again,
    attention_half,
    best,
    block,
    gb,
    held,
    ms_predicted,
    predicted,
    words,
)
from a2lib.report.chapters.measured import reason, time
from a2lib.report.metrics import level, pick
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.checkpointing import ATTENTION, FFN, textbook_segment
from a2lib.theory.strategy_memory import block_moments

# What certainly fits as little as with fresh gradients, and no sweep tries.
UNTRIED = ("none", "kept", WIDE)
HALVES = {ATTENTION: "attention", FFN: "FFN"}
KERNELS = {
    "w2": "products with w2", "widen w2's": "w2's gradient in fp32", "gate": "gate times value",
    "w1 w3": "products with w1 and w3", "q k v": "products with q, k and v",
    "rope": "RoPE", "norm": "norm", "output": "products with the output",
    "do v^T": "product for dP",
    "widen dp": "dP in fp32", "softmax": "softmax", "flash": "FlashAttention",
}  # fmt: skip


def table(c: Checkpointing, way: tuple[str, str], caption: str, name: str) -> Table:
    """A line for each strategy: peaks beyond what is held, predicted and measured, with gradients
    fresh and kept."""
    lines = []
    for strategy in STRATEGIES[way]:
        cells = []
        for gradients in GRADIENTS:
            row = c.row(strategy, gradients, way)
            cells += [gb(predicted(strategy, gradients, way).peak), _told(row, "peak_bytes")]
        lines.append([words(strategy), *cells])
    columns = ["checkpoint around", "fresh: GB predicted", "measured", "kept: GB predicted",
               "measured "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def times(c: Checkpointing, caption: str, name: str) -> Table:
    """A line for each strategy: forwards computed again, and the time of a step with fresh
    gradients in both settings."""
    lines = []
    for strategy in dict.fromkeys(s for way in TITLES for s in STRATEGIES[way]):
        cells = [style.digits(again(strategy, WIDE if strategy in STRATEGIES[WIDE] else NARROW))]
        for way in TITLES:
            row = c.row(strategy, "fresh", way)
            expected = ms_predicted(c, strategy, "fresh", way)
            cells += [time(expected if strategy in STRATEGIES[way] else None), _told(row, "ms")]
        lines.append([words(strategy), *cells])
    columns = ["checkpoint around", "forwards more", "fp32: ms predicted", "measured",
               "bf16: ms predicted", "measured "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def _told(row, column: str) -> str:
    """A row's time or bytes, or why it has none."""
    if row is None:
        return MISSING
    if row.status != "ok":
        return style.STATUS.get(row.status, row.status)
    return time(row.ms) if column == "ms" else gb(getattr(row, column))


def refused(c: Checkpointing) -> Markdown:
    """What was tried and has no figure, each with its reason, and what nobody has tried yet."""
    if not len(c.table):
        return Markdown(c.not_yet("what fits and what does not"))
    told, left = [], []
    for way, title in TITLES.items():
        for gradients in GRADIENTS:
            where = f"{title}, gradients {gradients}"
            rows = {s: c.row(s, gradients, way) for s in STRATEGIES[way]}
            for s, row in rows.items():
                if row is not None and row.status != "ok":
                    told.append(f"- {where}, {words(s)}: {reason(row.note)}")
            if ("none", gradients, way) == UNTRIED and rows["none"] is None:
                told.append(f"- {where}, {words('none')}: not tried, since more stays")
            none = [words(s) for s, row in rows.items()
                    if row is None and (s, gradients, way) != UNTRIED]  # fmt: skip
            left += [f"- **not measured yet**: {where}: {listed(none)}"] if none else []
    return Markdown("\n".join([*told, *left]) or "Everything that was tried has its figures.")


def held_bytes(c: Checkpointing) -> Markdown:
    """What stays between steps, which the peaks come on top of, and what then fits."""
    sizes = {g: held(g) for g in GRADIENTS}
    text = (
        f"The peaks are beyond what stays between steps: {gb(sizes['fresh'])} GB of weights and "
        f"moments, with kept gradients {gb(sizes['kept'])} GB."
    )
    found = pick(c.table, status="ok", model=MODEL, layers=LAYERS)
    if len(found):
        more = [row.held_bytes / sizes[row.gradients] - 1 for row in found.itertuples()]
        text += (f" Measured they are {style.between(more, '{:.1%}'.format)} more, what the "
                 "allocator gives beyond what it is asked for.")  # fmt: skip
    out = [words(s) for s in STRATEGIES[WIDE]
           if held("fresh") + predicted(s).peak > c.capacity()]  # fmt: skip
    if out:
        text += (f" Of the {c.capacity() / 1e9:.0f} GB of an {c.short} that leaves too little for "
                 f"{listed(out)} in the first setting.")  # fmt: skip
    return Markdown(text)


def textbook(c: Checkpointing) -> Markdown:
    """What the textbook's root gives, by setting, and the condition under which 1 beats 2."""
    told = []
    for way, title in TITLES.items():
        b = block(way)
        half = LAYERS * b.input / 2
        told.append(
            f"{title}: $k^*$ = {style.digits(textbook_segment(LAYERS, b))}, and "
            f"$A$ = {gb(b.saved)} GB {'>' if b.saved > half else '<'} $N I / 2$ = {gb(half)} GB"
        )
    return Markdown("; ".join(told) + ".")


def moments(caption: str, name: str) -> Table:
    """What is alive of a block, kernel by kernel of its backward, in both settings."""
    lines = []
    for way, title in TITLES.items():
        precision = "bf16" if way[0] == "bf16" else "fp32"
        found = block_moments(SHAPE, BATCH, CONTEXT, way[1], precision, fresh=False)
        beside = attention_half(way).saved
        sizes = [m.bytes + (beside if m.half == FFN else 0) for m in found]
        for moment, size in zip(found, sizes, strict=True):
            text = style.digits(size / 1e9)
            marked = f"**{text}**" if size == max(sizes) else text
            lines.append([title, HALVES[moment.half], KERNELS[moment.kernel], marked])
    columns = ["setting", "half", "when this ends", "GB alive"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=3, keys=1)


def units(caption: str, name: str) -> Table:
    """I, A, M and G of a block in both settings."""
    lines = []
    for way, title in TITLES.items():
        fresh, kept = (block(way, gradients) for gradients in GRADIENTS)
        sizes = kept.input, kept.saved, kept.gradients, kept.peak, fresh.peak
        lines.append([title, *map(gb, sizes)])
    columns = ["GB", "*I*", "*A*", "*G*", "*M* kept", "*M* fresh"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def example(c: Checkpointing) -> Markdown:
    """Both formulas at one block a segment, in numbers, and what the model adds to its blocks."""
    told = []
    for gradients, of, letter in (("kept", "input", "I"), ("fresh", "gradients", "G")):
        b = block(WIDE, gradients)
        waits, most = (LAYERS - 1) * getattr(b, of), predicted("block", gradients).peak
        beside = most - waits - b.peak
        head = f" + {gb(beside)}" if beside > 10**6 else ""
        told.append(f"with {gradients} gradients ${LAYERS - 1} \\, {letter} + M{head}$ = "
                    f"{gb(waits)} + {gb(b.peak)}{head} = {gb(most)} GB")  # fmt: skip
    return Markdown(f"One block at a time in {TITLES[WIDE]}: {listed(told)}, of which the last "
                    "term is the gradient of the head.")  # fmt: skip


def neighbours(c: Checkpointing) -> Markdown:
    """The measured best of the single-level segments, by setting and gradients, and half a block
    beside it."""
    told = []
    for way, title in TITLES.items():
        for gradients in GRADIENTS:
            rows = [row for s in SEGMENTS if (row := c.timed(s, gradients, way)) is not None]
            half = c.timed("half", gradients, way)
            if len(rows) < 2 or half is None:
                continue
            first, second = sorted(rows, key=lambda row: row.peak_bytes)[:2]
            said = "as predicted" if first.strategy == best(gradients, way) else "not as predicted"
            text = (f"- {title}, gradients {gradients}: {words(first.strategy)} at "
                    f"{gb(first.peak_bytes)} GB, {said}, then {words(second.strategy)} at "
                    f"{gb(second.peak_bytes)} GB; half a block ")  # fmt: skip
            apart = half.peak_bytes - first.peak_bytes
            if abs(apart) < 0.01 * first.peak_bytes:
                text += "the same to 1%"
            else:
                text += f"{gb(abs(apart))} GB {'more' if apart > 0 else 'less'}"
            text += f", and its step {_against(half, first)}"
            told.append(text)
    if not told:
        return Markdown(c.not_yet("the best segment and its neighbours"))
    return Markdown("\n".join(f"{text}." for text in told))


def _against(one, other) -> str:
    if level(one, other):
        return "takes as long"
    share = one.ms / other.ms - 1
    return f"takes {abs(share):.1%} {'longer' if share > 0 else 'less time'}"

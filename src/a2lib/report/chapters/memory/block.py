"""What one block keeps for its backward: by formula, by hooks, by the allocator; its gradients."""

from __future__ import annotations

import pandas as pd
from matplotlib.patches import Patch

from a2lib.report import style
from a2lib.report.chapters.memory.precision import KINDS, kinds
from a2lib.report.chapters.memory.rows import (
    ATTENTIONS,
    BATCH,
    CONTEXTS,
    MODEL,
    PRECISIONS,
    Memory,
    mb,
    step,
)
from a2lib.report.metrics import row_of
from a2lib.report.style import Chart
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.saved import block_saved, block_saved_bytes
from a2lib.theory.transformer import SIZES, block_gradient_bytes, block_parameter_count

LONGEST = CONTEXTS[-1]
TITLES = {"eager": "eager", "flash": "ours"}
COLOURS = ("#808080", "#86b6e6", "#444444", "#0072b2", "#d55e00", "#f0ad78")
FIVE = 5


def sentence(m: Memory) -> Markdown:
    """The bytes and the five largest, eager and ours, and the gradients."""
    eager, ours = (block_saved_bytes(SIZES[MODEL], BATCH, LONGEST, a) for a in ATTENTIONS)
    top = largest(LONGEST, "fp32", "eager")
    gradients = block_gradient_bytes(SIZES[MODEL])
    return Markdown(
        f"**The answer.** At {style.tokens(LONGEST)} tokens one block of the {MODEL} model keeps "
        f"{mb(eager)} MB in fp32 with eager attention, {top[0][2] / eager:.0%} of it in one "
        "tensor, the probabilities; with ours, which keeps a number a row in their place, "
        f"{mb(ours)} MB. "
        f"The five largest are {sum(size for *_, size in top) / eager:.0%} of the eager block's. "
        f"Its gradients are {mb(gradients)} MB whatever the context. {checked(m)}"
    )


def largest(context: int, precision: str, attention: str) -> list[tuple[str, str, int]]:
    """(module, what, bytes of one) of the five largest tensors by formula."""
    found = [
        (one.module, one.what, one.bytes // one.count)
        for one in block_saved(SIZES[MODEL], BATCH, context, attention, precision)
        for _ in range(one.count)
    ]
    return sorted(found, key=lambda entry: -entry[2])[:FIVE]


def checked(m: Memory) -> str:
    """Whether hooks and the allocator say what the formula says."""
    rows = m.blocks[m.blocks["status"] == "ok"]
    if not len(rows):
        return m.not_yet("the same by autograd's hooks and by the allocator")
    hooks, grown = [], []
    for row in rows.itertuples():
        formula = block_saved_bytes(SIZES[row.model], int(row.batch), int(row.context),
                                    row.attention, row.precision)  # fmt: skip
        hooks.append(int(row.saved_bytes) - formula)
        if not pd.isna(row.grown_bytes):
            grown.append(int(row.grown_bytes) - formula)
    text = f"Autograd's hooks saw the formula's bytes in {hooks.count(0)} of {len(hooks)} blocks"
    if any(hooks):
        text += f" and elsewhere up to {max(map(abs, hooks)):,} bytes more or less"
    if grown:
        text += f"; the allocator gave out those in {grown.count(0)} of {len(grown)}"
        if any(grown):
            beside = style.between([x for x in grown if x], "{:+,}".format)
            text += f" and elsewhere {beside} bytes beside them"
    return f"{text}."


def table(m: Memory, caption: str, name: str) -> Table:
    """Formula, hooks, the allocator and gradients by context, precision and attention."""
    expected = block_gradient_bytes(SIZES[MODEL])
    lines = []
    for context in CONTEXTS:
        for precision in PRECISIONS:
            for attention in ATTENTIONS:
                formula = block_saved_bytes(SIZES[MODEL], BATCH, context, attention, precision)
                row = row_of(m.blocks, model=MODEL, context=context, batch=BATCH,
                             precision=precision, attention=attention)  # fmt: skip
                cells = [MISSING] * 3
                if row is not None and row.status != "ok":
                    cells[0] = style.STATUS[row.status]
                elif row is not None:
                    values = (row.saved_bytes, row.grown_bytes, row.gradient_bytes)
                    cells = [MISSING if pd.isna(x) else f"{int(x):,}" for x in values]
                lines.append([style.tokens(context), precision, TITLES[attention],
                              f"{formula:,}", *cells, f"{expected:,}"])  # fmt: skip
    columns = ["tokens", "", "attention", "formula", "by hooks", "by the allocator", "gradients",
               "expected"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=3, keys=3)


def five(m: Memory, precision: str, attention: str, caption: str, name: str) -> Table:
    """The five largest tensors with their share; with the operations that keep them once seen."""
    total = block_saved_bytes(SIZES[MODEL], BATCH, LONGEST, attention, precision)
    seen = m.picture("saved", step(LONGEST, "forward-backward", precision, attention), None)
    rows = sorted(seen.rows, key=lambda row: -row["bytes"])[:FIVE] if seen else []
    lines = []
    for place, (module, what, size) in enumerate(largest(LONGEST, precision, attention)):
        kept = MISSING
        if place < len(rows):
            operations = rows[place]["operations"].split()
            first = f"`{operations[0]}`" if operations else "a function of ours"
            kept = f"{first}, {rows[place]['module']}: {mb(rows[place]['bytes'])} MB"
        lines.append([f"{module}: {what}", mb(size), f"{size / total:.1%}", kept])
    columns = ["tensor", "MB", "share", "kept first by, as seen"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def ties(context: int = LONGEST) -> Markdown:
    """Where places two to five are no order but a tie."""
    top = largest(context, "fp32", "eager")
    equal = [entry for entry in top if entry[2] == top[1][2]]
    return Markdown(
        f"Behind the probabilities {len(equal)} of the five are equal, {mb(top[1][2])} MB each: "
        "the FFN's hidden tensors (gate, its SiLU, the value, and the product of the two). Any "
        "order among them says nothing."
    )


def chart() -> Chart:
    """What a block keeps by kind: a bar for each precision and attention."""
    bars = [(p, a) for p in PRECISIONS for a in ATTENTIONS]

    def draw(figure):
        ax = figure.subplots()
        for y, (precision, attention) in enumerate(bars):
            left = 0.0
            for kind, colour in zip(KINDS, COLOURS, strict=True):
                size = kinds(LONGEST, precision, attention)[kind] / 1e9
                ax.barh(y, size, 0.66, left, color=colour, linewidth=0)
                left += size
            ax.annotate(f" {left:.3g}", (left, y), va="center")
        ax.set_yticks(range(len(bars)), [f"{p}, {TITLES[a]}" for p, a in bars])
        ax.invert_yaxis()
        ax.margins(x=0.12)
        ax.set_xlabel("kept by one block (GB)")
        ax.grid(axis="y", visible=False)
        handles = [Patch(color=c, label=k, linewidth=0)
                   for k, c in zip(KINDS, COLOURS, strict=True)]  # fmt: skip
        figure.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False,
                      columnspacing=1.0, handlelength=1.0, handletextpad=0.5)  # fmt: skip

    return Chart(draw, height=3.6)


def gradients(m: Memory) -> Markdown:
    """What the gradients should take, and whether they do."""
    shape = SIZES[MODEL]
    text = (
        f"A block has $4 D^2 + 3 D F + 2 D$ = {block_parameter_count(shape):,} parameters, so its "
        f"gradients in fp32 are {block_gradient_bytes(shape):,} bytes, in either precision: the "
        "backward of the cast gives fp32."
    )
    rows = m.blocks[m.blocks["status"] == "ok"].dropna(subset=["gradient_bytes"])
    if not len(rows):
        return Markdown(f"{text} {m.not_yet('the gradients of a block')}")
    right = sum(int(r.gradient_bytes) == block_gradient_bytes(SIZES[r.model])
                for r in rows.itertuples())  # fmt: skip
    return Markdown(f"{text} Measured: so in {right} of {len(rows)} blocks.")


def against_activations() -> Markdown:
    """From which context on a block keeps more than its gradients take."""
    least = block_gradient_bytes(SIZES[MODEL])
    longer = [c for c in CONTEXTS if block_saved_bytes(SIZES[MODEL], BATCH, c) > least]
    return Markdown(
        f"A block keeps more than its gradients take from {style.tokens(longer[0])} tokens on. "
        "While backward passes a block it drops the one and makes the other: below that length "
        "memory grows during backward, above it falls."
    )

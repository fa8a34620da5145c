"""The first screen: what a step takes, when it peaks where, and the figure of that."""

from __future__ import annotations

from matplotlib.patches import Patch

from a2lib.report import style
from a2lib.report.chapters import profile
from a2lib.report.chapters.memory.rows import (
    CONTEXTS,
    MODEL,
    MODES,
    PRECISIONS,
    Memory,
    counted,
    gb,
    step,
)
from a2lib.report.style import Chart
from a2lib.report.tables import Markdown
from a2lib.theory.step_tensors import CATEGORIES, GRADIENTS, SAVED
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

"""bf16 autocast beside fp32: which bytes go, which come."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import TITLES
from a2lib.report.chapters.memory.rows import (
    BATCH,
    CONTEXTS,
    MODEL,
    MODELS,
    MODES,
    PRECISIONS,
    Memory,
    counted,
    gb,
    mb,
    step,
)
from a2lib.report.tables import Markdown, Table
from a2lib.theory.saved import block_saved
from a2lib.theory.step_memory import asked
from a2lib.theory.transformer import SIZES

# What a kept tensor is counted with.
KINDS = {
    "norms and residual stream": ("input", "root", "normalised", "norm"),
    "copies for the linear layers": ("16-bit norm",),
    "copies of the weights": ("16-bit weight",),
    "q, k, v and the heads' results": ("q, k, v", "heads' results"),
    "scores": ("mask", "probabilities", "16-bit probabilities"),
    "FFN": ("gate, SiLU, value", "product"),
}


def kinds(context: int, precision: str, attention: str = "eager") -> dict[str, int]:
    """Bytes that a block keeps, by kind."""
    found = dict.fromkeys(KINDS, 0)
    for one in block_saved(SIZES[MODEL], BATCH, context, attention, precision):
        kind = next((k for k, whats in KINDS.items() if one.what in whats), "scores")
        found[kind] += one.bytes
    return found


def table(caption: str, name: str) -> Table:
    """What one block keeps by kind, in either precision."""
    contexts = (CONTEXTS[0], CONTEXTS[2], CONTEXTS[-1])
    lines = []
    columns = {(c, p): kinds(c, p) for c in contexts for p in ("fp32", "bf16")}
    for kind in KINDS:
        lines.append([kind, *(mb(found[kind]) for found in columns.values())])
    lines.append(["together", *(mb(sum(found.values())) for found in columns.values())])
    heads = [f"{style.tokens(c)}: fp32" if p == "fp32" else p + " " * contexts.index(c)
             for c, p in columns]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=["", *heads]), caption, name)


def sentence(m: Memory) -> Markdown:
    """In which configurations bf16 takes less, as counted and as measured."""
    ranges = []
    for mode in ("inference", "train-step"):
        ratios = [counted(step(c, mode, "bf16")).total / counted(step(c, mode)).total
                  for c in CONTEXTS]  # fmt: skip
        ranges.append(style.between(ratios, _times))
    text = (
        f"By the count a forward of {MODEL} that keeps nothing takes {ranges[0]} times the memory "
        f"of fp32 over {style.tokens(CONTEXTS[0])} to {style.tokens(CONTEXTS[-1])} tokens, and a "
        f"train-step {ranges[1]} times. "
    )
    rows = [r for c in CONTEXTS for mode in MODES if (r := _ratio(m, c, mode, MODEL))]
    if not rows:
        return Markdown(text + m.not_yet("bf16 beside fp32"))
    less = sum(ratio < 1 for ratio in rows)
    text += (
        f"Measured, bf16 takes less in {less} of {len(rows)} configurations of {MODEL} that fit in "
        f"both, {style.between(rows, _times)} times as much."
    )
    return Markdown(text + _others(m))


def _others(m: Memory) -> str:
    """Where a train-step of another size takes less in bf16, and why there alone."""
    pairs = {(model, c): r for model in MODELS if model != MODEL for c in CONTEXTS
             if (r := _ratio(m, c, "train-step", model))}  # fmt: skip
    if not pairs:
        return ""
    less = {key: ratio for key, ratio in pairs.items() if ratio < 1}
    text = f" Of the other sizes' train-steps it takes less in {len(less)} of {len(pairs)}"
    if not less:
        return f"{text}."
    where = style.listed([f"{TITLES[model]} at {style.tokens(c)}" for model, c in less])
    return (
        f"{text}: {where} tokens, {style.between(list(less.values()), _times)} times as much. What "
        "bf16 saves of a block grows with the tokens, the copies of its weights do not, and the "
        "second copy of the probabilities grows with the square of the tokens: bf16 can win only "
        "in between, and less so the wider the model."
    )


def _ratio(m: Memory, context: int, mode: str, model: str) -> float | None:
    both = [m.row(step(context, mode, p, model=model)) for p in PRECISIONS]
    if any(row is None or row.status != "ok" for row in both):
        return None
    return both[1].tensor_bytes / both[0].tensor_bytes


def _times(ratio: float) -> str:
    return f"{ratio:.2f}"


def copies(model: str) -> int:
    """Bytes of autocast's copies: of every matrix but the embedding, which multiplies nothing."""
    shape = SIZES[model]
    kept = sum(one.bytes for one in block_saved(shape, BATCH, CONTEXTS[0], "eager", "bf16")
               if one.what == "16-bit weight")  # fmt: skip
    return kept * shape.num_layers + 2 * shape.vocab_size * shape.d_model


def cache(m: Memory) -> Markdown:
    """Autocast's copies of the weights, which a forward alone shows."""
    shown = (MODEL, MODELS[-1])
    sizes = [f"{copies(model):,} of {model}" for model in shown]
    takes = []
    for model in shown:
        wide, narrow = (gb(asked(step(CONTEXTS[0], "inference", p, model=model)))
                        for p in PRECISIONS)  # fmt: skip
        takes.append(f"{narrow} GB in bf16 and {wide} in fp32 ({model})")
    text = (
        "Autocast keeps its bf16 copy of each matrix but the embedding until its context ends, "
        f"{style.listed(sizes)} in bytes, also where nothing is kept for a backward: that is why a "
        f"forward alone at {CONTEXTS[0]} tokens takes {style.listed(takes)}. There each copy is "
        "used once, so that keeping it saves no work."
    )
    pairs = [r for model in MODELS for c in CONTEXTS if (r := _ratio(m, c, "inference", model))]
    if not pairs:
        return Markdown(f"{text} {m.not_yet('such a forward of every size')}")
    rows = m.table[(m.table["phase"] == "step") & (m.table["mode"] == "inference")
                   & (m.table["precision"] == "bf16") & (m.table["status"] == "ok")]  # fmt: skip
    exact = sum(
        int(r.tensor_bytes) == asked(step(r.context, r.mode, r.precision, r.attention, r.model))
        for r in rows.itertuples()
    )
    return Markdown(
        f"{text} Measured, over all sizes and contexts, a forward that keeps nothing takes "
        f"{style.between(pairs, _times)} times as much in bf16 ({len(pairs)} pairs); with "
        f"those copies the counted peak is the GPU's to the byte in {exact} of {len(rows)} steps."
    )

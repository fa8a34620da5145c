"""The largest tensors, by count and by the line that asked for them; the residual stream's."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import TITLES
from a2lib.report.chapters.memory.rows import (
    BATCH,
    CONTEXTS,
    MODEL,
    MODELS,
    SHOWN,
    Memory,
    mb,
    step,
)
from a2lib.report.tables import Markdown, Table
from a2lib.theory.transformer import SIZES, residual_stream_bytes

# The kinds of tensor that a forward makes, as the count's sizes name them.
FORWARD = {"s": "scores, (B, H, T, T)", "l": "logits, (B, T, V)", "g": "FFN, (B, T, F)",
           "u": "residual stream, (B, T, D)"}  # fmt: skip
ROWS = 14


def residual(caption: str, name: str) -> Table:
    """Bytes of one residual-stream tensor by size and context."""
    lines = []
    for model in MODELS:
        sizes = [residual_stream_bytes(SIZES[model], BATCH, c) for c in CONTEXTS]
        lines.append([TITLES[model], SIZES[model].d_model, *(f"{n / 2**20:g}" for n in sizes)])
    columns = ["model", "D", *map(style.tokens, CONTEXTS)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def residual_sentence() -> Markdown:
    """The derivation, with one case worked."""
    size = residual_stream_bytes(SIZES[MODEL], BATCH, SHOWN)
    return Markdown(
        "A tensor of the residual stream has batch x tokens x $D$ numbers of 4 bytes: "
        f"{BATCH} x {SHOWN} x {SIZES[MODEL].d_model} x 4 = {size:,} bytes, "
        f"{size / 2**20:g} MiB. Under autocast it is as large, since the embedding gives fp32 and "
        "the additions keep it."
    )


def by_size(caption: str, name: str) -> Table:
    """Bytes of each kind of tensor in a forward, the largest of a context in bold."""
    lines = []
    for letters, words in FORWARD.items():
        sizes = [step(c).size(letters) for c in CONTEXTS]
        best = [max(step(c).size(kind) for kind in FORWARD) for c in CONTEXTS]
        pairs = zip(sizes, best, strict=True)
        cells = [f"**{mb(n)}**" if n == most else mb(n) for n, most in pairs]
        lines.append([words, *cells])
    columns = ["", *map(style.tokens, CONTEXTS)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def sentence() -> Markdown:
    """Which tensor is the largest from which context on."""
    s = SIZES[MODEL]
    ffn, logits = s.d_ff / s.num_heads, s.vocab_size / s.num_heads
    size = step(SHOWN).size("s")
    return Markdown(
        f"A tensor of scores is larger than one of the FFN where $T > F / H$, here {ffn:g} tokens, "
        f"and larger than the logits where $T > V / H$, here {logits:g}. At {SHOWN} tokens the "
        f"largest allocations of a forward are the scores: {BATCH} x {s.num_heads} x {SHOWN} x "
        f"{SHOWN} x 4 = {size:,} bytes, {size / 2**20:g} MiB. Each block makes four such tensors "
        "in its forward (the product, its scaled copy, the masked copy, the probabilities), of "
        "which one stays; a backward makes five more (the gradient of the probabilities, a product "
        "inside of softmax's gradient, and the gradients of the masked, the scaled and the plain "
        f"scores). In {s.num_layers} blocks that is {4 * s.num_layers} and {5 * s.num_layers}."
    )


def lines(m: Memory, mode: str, caption: str, name: str) -> Table:
    """The largest that a recorded step asked for, by line of code."""
    found = m.picture("lines", step(SHOWN, mode))
    body = []
    for row in found.rows[:ROWS] if found else ():
        where = f"`{row['line']}`" if row["line"] else "backward's own thread"
        of = f" ({row['name']})" if row["name"] else ""
        body.append([f"{row['bytes'] / 2**20:,.1f}", row["count"], row["phase"], row["category"],
                     f"{where}{of}"])  # fmt: skip
    columns = ["MiB each", "how many", "phase", "category", "asked for by"]
    return Table(pd.DataFrame(body, columns=columns), caption, name, left=5)


def verdict(m: Memory) -> Markdown:
    """Whether the largest recorded allocations of the forward are the scores."""
    found = m.picture("lines", step(SHOWN))
    if found is None:
        return Markdown(m.not_yet("the largest allocations by the line that asked for them"))
    forward = [row for row in found.rows if row["phase"] == "forward"]
    most = max(row["bytes"] for row in forward)
    asked = [row for row in forward if row["bytes"] == most]
    where = style.listed(list(dict.fromkeys(f"`{row['line']}`" for row in asked)))
    kind = next((w for k, w in FORWARD.items() if step(SHOWN).size(k) == most), "none of these")
    back = sum(row["count"] for row in found.rows
               if row["phase"] == "backward" and row["bytes"] == most)  # fmt: skip
    of = f" Backward asks for {back} of that size." if back else ""
    return Markdown(
        f"Recorded: the largest of the forward are {sum(row['count'] for row in asked)} of "
        f"{most:,} bytes, the size of {kind}, asked for by {where}.{of}"
    )

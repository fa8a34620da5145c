"""The tensors that one Transformer block saves for its backward, as exact byte counts.

The block is that of ``a2lib.model``: RMSNorm written as separate operations (square, mean, root,
two products), RoPE, and a fused SiLU. A tensor that several operations save counts once.
Parameters, RoPE's tables, and weights that are views of parameters do not count; the 16-bit copies
of weights that autocast makes do. book/memory.md adds the float32 tensors up. Where heads share
keys and values, k and v are narrower (``Shape.kv_width``); the repeated heads that eager attention
saves of them are not counted.

Under CUDA's bf16 autocast the residual stream and the norms stay float32. Each linear layer saves
a 16-bit copy of its input and of its weight (autocast caches only the copies of leaf tensors).
Eager attention's softmax runs in float32, and its output is copied for the matmul with v: 4 s + 2 s
bytes, where float32 has 4 s. So half the bytes per number does not halve the memory.
"""

from a2lib.checks import check_name, check_sizes
from a2lib.shapes import Shape
from a2lib.theory.products import NARROW, WIDE

ATTENTIONS = ("eager", "flash")
PRECISIONS = ("fp32", "bf16")


def block_saved(
    shape: Shape, batch: int, context: int, attention: str = "eager", precision: str = "fp32"
) -> dict[str, int]:
    """Return name -> bytes of each tensor that a block of ``shape`` saves, in the forward's order.

    Names: "0a/..." in the attention half, "0f/..." in the FFN half, "x0" and "y0" for the inputs of
    the two; "....16" for a copy of a weight, "....x" for a layer's own copy of its input.

    attention: of ``ATTENTIONS``
    precision: "fp32" (TF32 saves the same tensors) or "bf16", CUDA's autocast

    Raises ValueError, in one line, for anything else.
    """
    check_sizes(batch=batch, context=context)
    check_name("attention", attention, ATTENTIONS)
    check_name("precision", precision, PRECISIONS)
    narrow = precision == "bf16"
    width = NARROW if narrow else WIDE
    rows = batch * context
    stream = rows * shape.d_model
    queries, keys = rows * shape.q_width, rows * shape.kv_width
    hidden = rows * shape.d_ff
    scores = batch * shape.num_heads * context**2

    def norm(half: str, x: str) -> dict[str, int]:
        kept = {
            x: WIDE * stream,
            f"{half}/root": WIDE * rows,
            f"{half}/normal": WIDE * stream,
        }
        if not narrow:
            kept[f"{half}/norm"] = WIDE * stream
        return kept

    def copies(weight: str, outputs: int, inputs: bool = True) -> dict[str, int]:
        """Return the copies of a linear layer's weight and, if it is not in 16 bits yet, input."""
        if not narrow:
            return {}
        kept = {f"{weight}.16": NARROW * shape.d_model * outputs}
        if inputs:
            kept[f"{weight}.x"] = NARROW * stream
        return kept

    saved = norm("0a", "x0")
    saved |= copies("0a/attn.q_proj", shape.q_width)
    saved |= copies("0a/attn.k_proj", shape.kv_width)
    saved |= copies("0a/attn.v_proj", shape.kv_width)
    if attention != "eager":  # which saves a copy of v
        saved["0a/v0"] = width * keys
    saved |= {"0a/q": width * queries, "0a/k": width * keys}
    if attention == "eager":
        saved |= {"0a/mask": context**2, "0a/prob": WIDE * scores}
        if narrow:
            saved["0a/prob16"] = NARROW * scores
        saved |= {"0a/values": width * keys, "0a/o": width * queries}
    else:
        saved |= {"0a/o": width * queries, "0a/lse": WIDE * rows * shape.num_heads}
    saved |= copies("0a/attn.output_proj", shape.q_width, inputs=False)
    saved |= norm("0f", "y0")
    saved |= copies("0f/ffn.w1", shape.d_ff)
    saved |= copies("0f/ffn.w3", shape.d_ff)
    for name in ("gate", "value", "silu", "product"):
        saved[f"0f/{name}"] = width * hidden
    return saved | copies("0f/ffn.w2", shape.d_ff, inputs=False)


def block_saved_bytes(
    shape: Shape, batch: int, context: int, attention: str = "eager", precision: str = "fp32"
) -> int:
    """Return the sum of ``block_saved``; errors as there."""
    return sum(block_saved(shape, batch, context, attention, precision).values())

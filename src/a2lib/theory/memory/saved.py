"""What one block of the Transformer keeps for its backward, tensor by tensor, as exact integers.

The block of ``a2lib.model``: RMSNorm written out (square, mean, root, two products), RoPE, fused
SiLU. What several operations keep counts once. Parameters, RoPE's tables and weights that are only
views of parameters do not count, 16-bit copies of weights under autocast do. In elements, with

    u = B T D    g = B T F    s = B H T T    rows = B T    P = 4 D D + 3 D F

a block keeps, in float32 with eager attention, ``10 u + 4 g + s + 2 rows`` elements and a mask of
T T bytes: the input, the normalised and the scaled of either norm (6 u); q, k, v and the heads'
results (4 u); s probabilities; the FFN's gate, SiLU, value and their product (4 g). The backward of
``softmax`` needs its result alone, so the scores themselves are gone. FlashAttention keeps B H T
log-sum-exps in the place of s and the mask. Where heads share keys and values, k and v are narrower
(``Shape.kv_width``); what eager attention keeps of them repeated head by head is not counted, nor
are latents. Of experts the FFN is what a token meets.

PyTorch's own FlashAttention on CUDA keeps u elements and 24 bytes more, after ``mha_fwd`` in
``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``: its result has the strides of q
(``empty_like``), which RoPE leaves head by head, so that putting the heads side by side copies it;
and two tensors of dropout's random state, of 16 and 8 bytes, are made without dropout too.

Under CUDA's bf16 autocast the residual stream and the norms stay float32, each linear layer keeps
its own 16-bit copy of its input and of its weight (autocast caches the copies of leaf tensors
alone), and eager's softmax runs in float32 and is copied for its product: 4 s + 2 s bytes where
float32 has 4 s. That is why half the bytes a number does not halve the memory.
"""

from a2lib.theory.products import NARROW, WIDE, check_name, check_sizes
from a2lib.theory.transformer import Shape

ATTENTIONS = ("eager", "flash", "sdpa_flash")
PRECISIONS = ("fp32", "bf16")
MULTIPLE = 8  # of the head size, to which PyTorch's FlashAttention pads


def block_saved(
    shape: Shape, batch: int, context: int, attention: str = "eager", precision: str = "fp32"
) -> dict[str, int]:
    """Return name -> bytes of what a block of ``shape`` keeps, in the order of its forward.

    Names of the half that attends begin with "0a/", those of the FFN with "0f/", but for the input
    of either, "x0" and "y0"; ".16" ends those of copies of weights, ".x" those of a layer's own
    copies of its input. ``attention`` is of ``ATTENTIONS``; ``precision`` is fp32 (TF32 multiplies
    the same tensors) or bf16, CUDA's autocast. ``sdpa_flash`` is PyTorch's FlashAttention, which
    takes 16 bits alone and heads of multiples of 8. Raises ValueError, in one line, for anything
    else.
    """
    check_sizes(batch=batch, context=context)
    check_name("attention", attention, ATTENTIONS)
    check_name("precision", precision, PRECISIONS)
    if attention == "sdpa_flash" and (precision != "bf16" or shape.head_dim % MULTIPLE):
        raise ValueError(
            f"sdpa_flash with precision {precision!r} and head_dim {shape.head_dim}: allowed are "
            f"bf16 and multiples of {MULTIPLE}"
        )
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
        """Of a linear layer's weight and input; the input of some is in 16 bits as it is."""
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
    if attention == "sdpa_flash":  # its result head by head, beside that which is multiplied
        saved |= {"0a/heads": width * queries, "0a/seed": 16, "0a/unused": 8}
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

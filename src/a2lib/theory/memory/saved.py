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

from __future__ import annotations

from dataclasses import dataclass

from a2lib.theory.products import WIDE, check_name, check_sizes
from a2lib.theory.transformer import Shape

ATTENTIONS = ("eager", "flash", "sdpa_flash")
PRECISIONS = ("fp32", "bf16")
RANDOM_STATE = (16, 8)  # bytes of two tensors: seed and offset, and one that is not used
MULTIPLE = 8  # of the head size, to which PyTorch's FlashAttention pads


@dataclass(frozen=True)
class Saved:
    """``bytes`` that ``module`` of a block keeps, in words what; ``count`` tensors of them."""

    module: str
    what: str
    bytes: int
    count: int = 1


def block_saved(
    shape: Shape, batch: int, context: int, attention: str = "eager", precision: str = "fp32"
) -> list[Saved]:
    """What one block keeps, in the order of its forward.

    ``attention`` is eager, flash (this library's, and every other that keeps q, k, v, o and a
    float32 log-sum-exp) or sdpa_flash (PyTorch's on CUDA: bf16, heads of a multiple of 8);
    ``precision`` fp32 or bf16 (CUDA's autocast). The input of the block is counted. Raises
    ValueError, in one line, for others and for sizes that are not positive integers.
    """
    check_sizes(batch=batch, context=context)
    check_name("attention", attention, ATTENTIONS)
    check_name("precision", precision, PRECISIONS)
    if attention == "sdpa_flash" and (precision != "bf16" or shape.head_dim % MULTIPLE):
        raise ValueError(
            f"sdpa_flash with precision {precision!r} and head_dim {shape.head_dim}: allowed are "
            f"bf16 and multiples of {MULTIPLE}"
        )
    D, F, Q, KV = shape.d_model, shape.d_ff, shape.q_width, shape.kv_width
    rows = batch * context
    u, g, s = rows * D, rows * F, batch * shape.num_heads * context**2
    casts = precision == "bf16"
    narrow = 2 if casts else WIDE
    kept: list[Saved] = []

    def keep(module: str, what: str, *tensors: int) -> None:
        kept.append(Saved(module, what, sum(tensors), len(tensors)))

    def norm(module: str) -> None:
        keep(module, "input", WIDE * u)
        keep(module, "root", WIDE * rows)
        keep(module, "normalised", WIDE * u)

    def inputs(what: str, **modules: int) -> None:
        """Linear layers of one input, and their widths: once in float32; a copy each in bf16."""
        if not casts:
            keep(next(iter(modules)), what, WIDE * u)
            return
        for module, width in modules.items():
            keep(module, "16-bit weight", narrow * D * width)
            keep(module, f"16-bit {what}", narrow * u)

    norm("ln1")
    inputs("norm", **{"attn.q_proj": Q, "attn.k_proj": KV, "attn.v_proj": KV})
    keep("attn", "q, k, v", narrow * rows * Q, *[narrow * rows * KV] * 2)
    if attention == "eager":
        keep("attn", "mask", context**2)
        keep("attn", "probabilities", WIDE * s)
        if casts:
            keep("attn", "16-bit probabilities", narrow * s)
    else:
        keep("attn", "log-sum-exp", WIDE * rows * shape.num_heads)
    if attention == "sdpa_flash":
        keep("attn", "result, head by head", narrow * rows * Q)
        keep("attn", "random state", *RANDOM_STATE)
    if casts:
        keep("attn.output_proj", "16-bit weight", narrow * Q * D)
    # Flash keeps its result too: it is the same tensor, but for sdpa_flash.
    keep("attn.output_proj", "heads' results", narrow * rows * Q)
    norm("ln2")
    inputs("norm", **{"ffn.w1": F, "ffn.w3": F})
    keep("ffn", "gate, SiLU, value", *[narrow * g] * 3)
    if casts:
        keep("ffn.w2", "16-bit weight", narrow * D * F)
    keep("ffn.w2", "product", narrow * g)
    return kept


def block_saved_bytes(
    shape: Shape, batch: int, context: int, attention: str = "eager", precision: str = "fp32"
) -> int:
    """The sum of ``block_saved``; errors as there."""
    return sum(one.bytes for one in block_saved(shape, batch, context, attention, precision))

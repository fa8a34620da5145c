"""What one block of the Transformer keeps for its backward, tensor by tensor, as exact integers.

The block of ``a2lib.model`` (``operations.py``): RMSNorm written out (square, mean, root, two
products), RoPE, fused SiLU. What several operations keep counts once. Parameters, RoPE's tables and
weights that are only views of parameters do not count, 16-bit copies of weights under autocast do.
In elements, with

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

from a2lib.theory.memory.tape import SAVED
from a2lib.theory.memory.tensors import StepMemory
from a2lib.theory.products import check_name
from a2lib.theory.transformer import Shape

ATTENTIONS = ("eager", "flash", "sdpa_flash")
# Of PyTorch's FlashAttention bytes of two tensors: seed and offset, and one that is not used.
RANDOM_STATE = {"0a/seed": 16, "0a/unused": 8}
MULTIPLE = 8  # of the head size, to which PyTorch's FlashAttention pads


def block_saved(
    shape: Shape, batch: int, context: int, attention: str = "eager", precision: str = "fp32"
) -> dict[str, int]:
    """Name -> bytes of what a block of ``shape`` keeps, in the order of its forward: names are
    those of ``operations.py`` for the first block, "0a/" and "0f/" before what is made in either
    half; ".16" ends those of copies of weights, ".x" of a layer's own copies of its input.

    ``attention`` is of ``ATTENTIONS``; ``precision`` is fp32 (TF32 multiplies the same tensors) or
    bf16, CUDA's autocast. ``sdpa_flash`` is PyTorch's FlashAttention, which takes 16 bits alone and
    heads of multiples of 8. Raises ValueError, in one line, for anything else.
    """
    check_name("attention", attention, ATTENTIONS)
    own = "eager" if attention == "eager" else "flash"
    step = StepMemory(shape, batch, context, "forward", precision, own)
    if attention == "sdpa_flash" and (precision != "bf16" or shape.head_dim % MULTIPLE):
        raise ValueError(
            f"sdpa_flash with precision {precision!r} and head_dim {shape.head_dim}: allowed are "
            f"bf16 and multiples of {MULTIPLE}"
        )
    kept = {
        one.name: one.bytes
        for one in step.of_a_block("forward").events()
        if one.made and one.category == SAVED and one.name.startswith(("x0", "y0", "0a/", "0f/"))
    }
    if attention == "sdpa_flash":  # its result head by head, beside that which is multiplied
        kept |= {"0a/heads": kept["0a/o"], **RANDOM_STATE}
    return kept


def block_saved_bytes(
    shape: Shape, batch: int, context: int, attention: str = "eager", precision: str = "fp32"
) -> int:
    """The sum of ``block_saved``; errors as there."""
    return sum(block_saved(shape, batch, context, attention, precision).values())

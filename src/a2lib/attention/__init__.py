"""Attention: the definition, FlashAttention-2 in plain PyTorch, and in Triton.

attention_reference(q, k, v, is_causal=False)      scores in full; every backend's yardstick
FlashAttentionPyTorch.apply(q, k, v, is_causal)    tile by tile in PyTorch, any device
FlashAttentionTriton.apply(q, k, v, is_causal)     Triton kernels, forward and backward
flash_attention(q, k, v, is_causal=..., scale=...) the same kernels, the function to call
"""

from a2lib.attention.flash import FlashAttentionTriton, flash_attention
from a2lib.attention.reference import attention_reference
from a2lib.attention.tiled import FlashAttentionPyTorch
from a2lib.errors import UnsupportedError

__all__ = [
    "FlashAttentionPyTorch",
    "FlashAttentionTriton",
    "UnsupportedError",
    "attention_reference",
    "flash_attention",
]

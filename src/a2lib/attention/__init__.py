"""Attention: the definition, FlashAttention-2 in plain PyTorch, and in Triton.

attention_reference(q, k, v, is_causal=False)      scores in full; every backend's yardstick
FlashAttentionPyTorch.apply(q, k, v, is_causal)    tile by tile in PyTorch, any device
FlashAttentionTriton.apply(q, k, v, is_causal)     Triton kernels, forward and backward
flash_attention(q, k, v, is_causal=..., scale=...) the same kernels, the function to call

A name is loaded when it is asked for: ``dispatch``, the table of kernels, needs no torch, and only
a call of a kernel needs Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from a2lib.attention.flash import FlashAttentionTriton, flash_attention
    from a2lib.attention.reference import attention_reference
    from a2lib.attention.tiled import FlashAttentionPyTorch
    from a2lib.errors import UnsupportedError

_HOMES = {
    "FlashAttentionPyTorch": "a2lib.attention.tiled",
    "FlashAttentionTriton": "a2lib.attention.flash",
    "UnsupportedError": "a2lib.errors",
    "attention_reference": "a2lib.attention.reference",
    "flash_attention": "a2lib.attention.flash",
}
__all__ = [
    "FlashAttentionPyTorch",
    "FlashAttentionTriton",
    "UnsupportedError",
    "attention_reference",
    "flash_attention",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

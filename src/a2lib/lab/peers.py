"""Other implementations of attention, each of which runs or raises: none answers for another.

    o = flex(q, k, v, is_causal)       # all take q, k, v as (batch, heads, tokens, head_dim)

``flash_attention`` and ``attention_reference`` are called in the same way.
"""

import functools
import importlib.util
import math
from collections.abc import Callable

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from a2lib.attention import FlashAttentionPyTorch, FlashAttentionTriton, attention_reference
from a2lib.errors import UnsupportedError
from a2lib.model.attention import causal_mask, compiled_flex


def tiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Compute attention tile by tile in plain PyTorch."""
    return FlashAttentionPyTorch.apply(q, k, v, is_causal)


def compiled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Compute the definition of attention, compiled by torch.compile at the first call."""
    return _compiled_reference()(q, k, v, is_causal)


def compiled_backward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Run our Triton forward, with the backward that the handout asks for: over whole matrices,
    computed again in PyTorch, and compiled."""
    return _CompiledBackward.apply(q, k, v, is_causal)


class _CompiledBackward(FlashAttentionTriton):
    @staticmethod
    def backward(ctx, do: Tensor):
        return *_compiled_backward()(do, *ctx.saved_tensors, ctx.is_causal), None


def recomputed_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of attention, by equations 13 to 19 of the handout of 2025.

    All are ``(..., N, d)`` but lse, ``(..., N)``, the natural-log log-sum-exp of the rows of
    scores. Products are in q's dtype, as eager attention's are, everything between in lse's.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1, keepdim=True)
    p = torch.exp((q @ k.mT).to(lse.dtype) * scale - lse[..., None])
    if is_causal:
        row = torch.arange(q.shape[-2], device=q.device)[:, None]
        p = p.masked_fill(torch.arange(k.shape[-2], device=q.device) > row, 0.0)
    dv = p.to(do.dtype).mT @ do
    ds = (p * ((do @ v.mT).to(lse.dtype) - delta) * scale).to(q.dtype)
    return ds @ k, ds.mT @ q, dv


def sdpa(backend: str) -> Callable:
    """Return PyTorch's scaled_dot_product_attention with one backend, such as "FLASH_ATTENTION"."""

    def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        options = {"is_causal": is_causal, "enable_gqa": is_grouped(q, k)}
        if is_compiling():  # decided while traced: no part of a call
            with torch.nn.attention.sdpa_kernel([_backend(backend)]):
                return F.scaled_dot_product_attention(q, k, v, **options)
        _admit(backend)
        return F.scaled_dot_product_attention(q, k, v, **options)

    return forward


def flex(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Run FlexAttention, compiled at the first call."""
    mask = causal_mask(q.shape[-2], k.shape[-2], q.device) if is_causal else None
    return compiled_flex()(q, k, v, block_mask=mask, enable_gqa=is_grouped(q, k))


def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Run FlashAttention-4, the package `flash-attn-4`, which takes the heads behind the tokens.

    Raises UnsupportedError where it is not installed.
    """
    function = _flash_attention_4()
    in_order = torch.are_deterministic_algorithms_enabled()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, _ = function(q, k, v, causal=is_causal, deterministic=in_order)
    return o.transpose(1, 2)


def is_grouped(q: Tensor, k: Tensor) -> bool:
    """Return whether several query heads share a head of keys (grouped-query attention)."""
    return q.shape[-3] != k.shape[-3]


def has_flash_attention_4() -> bool:
    """Return whether FlashAttention-4 is installed."""
    return (
        importlib.util.find_spec("flash_attn") is not None
        and importlib.util.find_spec("flash_attn.cute") is not None
    )


@functools.cache
def _compiled_reference() -> Callable:
    return torch.compile(attention_reference, dynamic=False, fullgraph=True)


@functools.cache
def _compiled_backward() -> Callable:
    return torch.compile(recomputed_backward, dynamic=False, fullgraph=True)


@functools.cache
def _flash_attention_4() -> Callable:
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        why = f"FlashAttention-4 is not installed (pip install flash-attn-4): {error}"
        raise UnsupportedError(why) from None
    return flash_attn_func


# The one backend that SDPA may use in this process, and the context that says so.
_admitted: dict = {}


def _admit(backend: str) -> None:
    """Have SDPA use this backend or raise, until another is admitted.

    A context around each call would be timed with it, and takes the host longer than the call.
    """
    if backend not in _admitted:
        while _admitted:
            _admitted.popitem()[1].__exit__(None, None, None)
        _admitted[backend] = torch.nn.attention.sdpa_kernel([_backend(backend)])
        _admitted[backend].__enter__()


def _backend(name: str):
    return getattr(torch.nn.attention.SDPBackend, name)

"""The backward that the handout asks for: whole matrices, computed again in PyTorch, compiled.

o = CompiledBackward.apply(q, k, v, is_causal)        # forward: our Triton kernel
"""

import math

import torch
from torch import Tensor

from a2lib.attention import FlashAttentionTriton


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool):
    """dq, dk and dv of attention, by equations 13 to 19 of the handout of 2025.

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


class CompiledBackward(FlashAttentionTriton):
    """``FlashAttentionTriton`` with ``backward`` under torch.compile in place of its kernels."""

    @staticmethod
    def backward(ctx, do: Tensor):
        return *_compiled(do, *ctx.saved_tensors, ctx.is_causal), None


_compiled = torch.compile(backward, dynamic=False, fullgraph=True)

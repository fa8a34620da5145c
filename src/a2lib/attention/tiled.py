"""Run FlashAttention-2 tile by tile in plain PyTorch: the algorithm, readable, on any device.

The loops are those of algorithms 1 and 2 of Dao, "FlashAttention-2" (2023), in the same order as
the Triton kernels run them. It is slow (a handful of launches a tile) and small in memory.
"""

import math

import torch
from torch import Tensor

from a2lib.attention.shapes import (
    check_distinct,
    check_first_derivative,
    check_inputs,
    check_is_causal,
)

TILE = 64  # queries and keys a tile


def _tiles(n: int):
    return [slice(start, min(start + TILE, n)) for start in range(0, n, TILE)]


def _scores(q: Tensor, k: Tensor, rows: slice, cols: slice, scale: float, is_causal: bool):
    """Return the scaled, masked scores of one tile, in the accumulation dtype."""
    s = _accumulate(q[..., rows, :]) @ _accumulate(k[..., cols, :]).transpose(-1, -2) * scale
    if is_causal and cols.stop - 1 > rows.start:
        i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        j = torch.arange(cols.start, cols.stop, device=q.device)
        s = s.masked_fill(j > i, float("-inf"))
    return s


def _accumulate(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _visible(rows: slice, n_keys: int, is_causal: bool):
    """Return the key tiles that any query of these rows sees."""
    return _tiles(min(rows.stop, n_keys) if is_causal else n_keys)


class FlashAttentionPyTorch(torch.autograd.Function):
    """Run FlashAttention-2 in PyTorch: ``apply(q, k, v, is_causal=False)``.

    Arguments:

    - ``q``: ``(..., heads, n_queries, d)``; ``k`` and ``v``: ``(..., kv_heads, n_keys, d)``, in one
      floating dtype. heads is a multiple of kv_heads (grouped-query attention).
    - ``is_causal``: if true, query i sees the keys j <= i.

    Returns: ``(..., heads, n_queries, d)`` in q's dtype. Sums are in float32 (float64 for float64),
    also under autocast.

    Saves q, k, v, o, and the natural-log log-sum-exp of each query's scores, ``q.shape[:-1]``.

    Raises:

    - TypeError or ValueError: arguments that are no tensors, or do not fit each other;
    - RuntimeError: a backward with ``create_graph=True``.

    Source: FlashAttention-2 (Dao, 2023), algorithms 1 and 2.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        if torch.compiler.is_compiling():
            check_distinct(q, k, v)
        ctx.group, ctx.is_causal = check_inputs(q, k, v), check_is_causal(is_causal)
        # Which would run the fp32 products of the tiles in 16 bits.
        with torch.autocast(_autocast_device(q), enabled=False):
            o, lse = _forward(q, _expand(k, ctx.group), _expand(v, ctx.group), ctx.is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        check_first_derivative()
        q, k, v, o, lse = ctx.saved_tensors
        k, v = _expand(k, ctx.group), _expand(v, ctx.group)
        with torch.autocast(_autocast_device(do), enabled=False):
            dq, dk, dv = _backward(do, q, k, v, o, lse, ctx.is_causal)
        dk, dv = _reduce(dk, ctx.group), _reduce(dv, ctx.group)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _autocast_device(x: Tensor) -> str:
    # There is none of "meta", and PyTorch's own question about that torch.compile refuses.
    return "cpu" if x.device.type == "meta" else x.device.type


def _forward(q, k, v, is_causal):
    """Return o and the log-sum-exp of each query's scores, by algorithm 1."""
    scale = 1 / math.sqrt(q.shape[-1])
    o = torch.zeros_like(q)
    lse = _accumulate(q.new_empty(0)).new_full(q.shape[:-1], float("-inf"))
    for rows in _tiles(q.shape[-2]):
        m = lse[..., rows].clone()
        l_sum = torch.zeros_like(m)
        acc = torch.zeros_like(_accumulate(q[..., rows, :]))
        for cols in _visible(rows, k.shape[-2], is_causal):
            s = _scores(q, k, rows, cols, scale, is_causal)
            m_new = torch.maximum(m, s.amax(-1))
            m_safe = m_new.masked_fill(m_new == float("-inf"), 0.0)
            p = torch.exp(s - m_safe[..., None])
            alpha = torch.exp(m - m_safe)
            l_sum = l_sum * alpha + p.sum(-1)
            acc = acc * alpha[..., None] + p @ _accumulate(v[..., cols, :])
            m = m_new
        l_safe = l_sum.masked_fill(l_sum == 0, 1.0)
        o[..., rows, :] = (acc / l_safe[..., None]).to(o.dtype)
        lse[..., rows] = m + torch.log(l_safe)
    return o, lse


def _backward(do, q, k, v, o, lse, is_causal):
    """Return dq, dk and dv in the accumulation dtype, by algorithm 2."""
    scale = 1 / math.sqrt(q.shape[-1])
    # +inf makes the weights of a row without visible keys 0 instead of NaN.
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    delta = (_accumulate(do) * _accumulate(o)).sum(-1)
    dq = torch.zeros_like(_accumulate(q))
    dk, dv = torch.zeros_like(_accumulate(k)), torch.zeros_like(_accumulate(v))
    for rows in _tiles(q.shape[-2]):
        q_rows, do_rows = _accumulate(q[..., rows, :]), _accumulate(do[..., rows, :])
        for cols in _visible(rows, k.shape[-2], is_causal):
            s = _scores(q, k, rows, cols, scale, is_causal)
            p = torch.exp(s - lse[..., rows, None])
            dv[..., cols, :] += p.transpose(-1, -2) @ do_rows
            dp = do_rows @ _accumulate(v[..., cols, :]).transpose(-1, -2)
            ds = p * (dp - delta[..., rows, None]) * scale
            dq[..., rows, :] += ds @ _accumulate(k[..., cols, :])
            dk[..., cols, :] += ds.transpose(-1, -2) @ q_rows
    return dq, dk, dv


def _expand(x: Tensor, group: int) -> Tensor:
    """Repeat each head of keys or values, which a group of query heads shares."""
    return x if group == 1 else x.repeat_interleave(group, dim=-3)


def _reduce(dx: Tensor, group: int) -> Tensor:
    """Sum the gradients of the query heads that shared one key head."""
    return dx if group == 1 else dx.unflatten(-3, (-1, group)).sum(-3)

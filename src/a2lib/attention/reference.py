"""Attention written down as its definition: the N x N matrix and all."""

import math

import torch
from torch import Tensor

from a2lib.attention.shapes import check_inputs


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, scale: float | None = None
) -> Tensor:
    """``softmax(scale * q @ k.T) @ v``, materialising the scores.

    q: ``(..., n_queries, d)``; k, v: ``(..., n_keys, d)``. The last leading dimension counts
    heads; q may have a whole multiple of the heads of k and v (grouped-query attention). With
    ``is_causal`` query i sees the keys j <= i, aligned at the first query whatever the lengths.
    ``scale`` defaults to ``1 / sqrt(d)``. Returns ``(..., n_queries, d)`` in q's dtype.

    Raises ValueError where the shapes or dtypes do not fit each other.
    """
    group = check_inputs(q, k, v)
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=-3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        n_queries, n_keys = scores.shape[-2:]
        query = torch.arange(n_queries, device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(n_keys, device=q.device) > query, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v

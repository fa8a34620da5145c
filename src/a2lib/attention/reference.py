"""Compute attention by its definition, with the N x N matrix and all."""

import math

import torch
from torch import Tensor

from a2lib.attention.shapes import check_inputs, check_is_causal, check_scale


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, *, scale: float | None = None
) -> Tensor:
    """Compute ``softmax(scale * q @ k.T) @ v`` by its definition, with all scores in memory.

    Arguments:

    - ``q``: ``(..., heads, n_queries, d)``; ``k`` and ``v``: ``(..., kv_heads, n_keys, d)``, in one
      floating dtype. heads is a multiple of kv_heads (grouped-query attention).
    - ``is_causal``: if true, query i sees the keys j <= i.
    - ``scale``: a number above 0, ``1 / sqrt(d)`` if None.

    Returns: ``(..., heads, n_queries, d)`` in q's dtype; under autocast in autocast's, as both
    products are. It can be differentiated any number of times.

    Raises TypeError or ValueError for arguments that are no tensors, or do not fit each other.
    """
    group = check_inputs(q, k, v)
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=-3) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else check_scale(scale)
    scores = q @ k.transpose(-1, -2) * scale
    if check_is_causal(is_causal):
        n_queries, n_keys = scores.shape[-2:]
        query = torch.arange(n_queries, device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(n_keys, device=q.device) > query, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v

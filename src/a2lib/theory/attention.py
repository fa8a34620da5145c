"""FLOPs and bytes of attention.

FLOPs follow the convention of the FlashAttention papers (FlashAttention-2, section 4.1;
FlashAttention-3, section 4.1): two per multiply-add of the matmuls alone, half of them if the mask
is causal, whatever the block size. The forward has two matmuls, the backward five.
"""

from a2lib.checks import check_name, check_sizes
from a2lib.theory.products import WIDE

PASSES = ("forward", "backward", "end_to_end")


def attention_flops(
    batch: int, heads: int, n_queries: int, n_keys: int, head_dim: int, causal: bool, pass_: str
) -> int:
    """Return the FLOPs of one attention call.

    Forward is ``4 * batch * heads * n_queries * n_keys * head_dim`` (q k^T and p v), halved where
    ``causal``; backward is 2.5 times that (q k^T again, dv, dp, dq, dk) and end_to_end 3.5 times.
    Halving counts ``n**2 / 2`` of the ``n * (n + 1) / 2`` pairs that a square causal mask keeps.
    Raises ValueError for a size that is not a positive integer or an unknown pass.
    """
    check_sizes(batch=batch, heads=heads, n_queries=n_queries, n_keys=n_keys, head_dim=head_dim)
    check_name("pass", pass_, PASSES)
    product = batch * heads * n_queries * n_keys * head_dim * (1 if causal else 2)
    return product * {"forward": 2, "backward": 5, "end_to_end": 7}[pass_]


def attention_bytes(
    batch: int,
    heads: int,
    n_queries: int,
    n_keys: int,
    head_dim: int,
    element_bytes: int,
    pass_: str,
) -> int:
    """Return the fewest bytes that one attention call moves through device memory: each tensor
    once.

    Forward reads q, k, v and writes o and the float32 log-sum-exp. Backward reads these five and
    do, and writes dq, dk, dv. end_to_end is both. Raises ValueError as attention_flops.
    """
    check_name("pass", pass_, PASSES)
    check_sizes(batch=batch, heads=heads, n_queries=n_queries, n_keys=n_keys)
    check_sizes(head_dim=head_dim, element_bytes=element_bytes)
    row = head_dim * element_bytes
    query, key = batch * heads * n_queries * row, batch * heads * n_keys * row
    lse = batch * heads * n_queries * WIDE
    forward = 2 * query + 2 * key + lse
    backward = 4 * query + 4 * key + lse
    return {"forward": forward, "backward": backward, "end_to_end": forward + backward}[pass_]

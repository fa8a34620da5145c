"""Operations and bytes of attention and of a matrix product, as exact integers.

Operations follow the convention of the FlashAttention papers (FlashAttention-2, section 4.1;
FlashAttention-3, section 4.1): two per multiply-add of the matrix products alone, half of them if
the mask is causal whatever the block size, and a backward of five products to the forward's two.
"""

from __future__ import annotations

PASSES = ("forward", "backward", "end_to_end")


def attention_flops(
    batch: int,
    heads: int,
    n_queries: int,
    n_keys: int,
    head_dim: int,
    causal: bool,
    pass_: str,
) -> int:
    """Floating-point operations of one attention call.

    Forward is ``4 * batch * heads * n_queries * n_keys * head_dim`` (q k^T and p v), halved where
    ``causal``; backward is 2.5 times that (q k^T again, dv, dp, dq, dk) and end_to_end 3.5 times.
    Halving counts ``n**2 / 2`` of the ``n * (n + 1) / 2`` pairs that a square causal mask keeps.
    Raises ValueError for a size that is not a positive integer or an unknown pass.
    """
    check_sizes(batch=batch, heads=heads, n_queries=n_queries, n_keys=n_keys, head_dim=head_dim)
    _check_pass(pass_)
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
    """The fewest bytes one attention call moves through device memory: each tensor once.

    Forward reads q, k, v and writes o and the float32 log-sum-exp. Backward reads those five and
    do, and writes dq, dk, dv. end_to_end is both. With attention_flops this gives the roofline: no
    call is faster than the larger of operations over the peak rate and bytes over the bandwidth.
    Raises ValueError as attention_flops.
    """
    check_sizes(
        batch=batch,
        heads=heads,
        n_queries=n_queries,
        n_keys=n_keys,
        head_dim=head_dim,
        element_bytes=element_bytes,
    )
    _check_pass(pass_)
    query = batch * heads * n_queries * head_dim * element_bytes  # q, o, do or dq
    key = batch * heads * n_keys * head_dim * element_bytes  # k, v, dk or dv
    lse = batch * heads * n_queries * 4
    forward = 2 * query + 2 * key + lse
    backward = 4 * query + 4 * key + lse
    return {"forward": forward, "backward": backward, "end_to_end": forward + backward}[pass_]


def matmul_flops(m: int, n: int, k: int) -> int:
    """Floating-point operations of an (m, k) by (k, n) matrix product: ``2 * m * n * k``."""
    check_sizes(m=m, n=n, k=k)
    return 2 * m * n * k


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; allowed are positive integers")


def _check_pass(pass_: str) -> None:
    if pass_ not in PASSES:
        raise ValueError(f"pass {pass_!r}: allowed are {', '.join(PASSES)}")

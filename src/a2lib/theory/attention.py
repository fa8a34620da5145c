"""Operations and bytes of attention, counted.

Operations follow the convention of the FlashAttention papers (FlashAttention-2, section 4.1;
FlashAttention-3, section 4.1): two per multiply-add of the matrix products alone, half of them if
the mask is causal whatever the block size, and a backward of five products to the forward's two.
"""

from __future__ import annotations

from a2lib.theory.products import check_name, check_sizes

PASSES = ("forward", "backward", "end_to_end")


def attention_flops(
    batch: int, heads: int, n_queries: int, n_keys: int, head_dim: int, causal: bool, pass_: str
) -> int:
    """Floating-point operations of one attention call.

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
    """The fewest bytes one attention call moves through device memory: each tensor once.

    Forward reads q, k, v and writes o and the float32 log-sum-exp. Backward reads those five and
    do, and writes dq, dk, dv. end_to_end is both. With attention_flops this gives the roofline: no
    call is faster than the larger of operations over the peak rate and bytes over the bandwidth.
    Raises ValueError as attention_flops.
    """
    check_name("pass", pass_, PASSES)
    query, key, lse = tensor_bytes(batch, heads, n_queries, n_keys, head_dim, element_bytes)
    forward = 2 * query + 2 * key + lse
    backward = 4 * query + 4 * key + lse
    return {"forward": forward, "backward": backward, "end_to_end": forward + backward}[pass_]


def tensor_bytes(
    batch: int, heads: int, n_queries: int, n_keys: int, head_dim: int, element_bytes: int
) -> tuple[int, int, int]:
    """Bytes of q, o, do or dq; of k, v, dk or dv; and of a float32 for each query, as the
    log-sum-exp has. Raises ValueError for sizes that are not positive integers."""
    sizes = {"batch": batch, "heads": heads, "n_queries": n_queries, "n_keys": n_keys}
    check_sizes(**sizes, head_dim=head_dim, element_bytes=element_bytes)
    rows, row = batch * heads, head_dim * element_bytes
    return rows * n_queries * row, rows * n_keys * row, rows * n_queries * 4


# kernel: who owns a program, products per tile, matrices of the owner's rows that are read or
# written once, and fp32 numbers per streamed row.
KERNELS = {
    "forward": ("queries", 2, 2, 0),
    "backward_dq": ("queries", 3, 4, 0),
    "backward_dkdv": ("keys", 4, 4, 2),
}


def tiled_l2_bytes(
    kernel: str,
    batch: int,
    heads: int,
    n_queries: int,
    n_keys: int,
    head_dim: int,
    causal: bool,
    element_bytes: int,
    Bq: int,
    Bk: int,
) -> int:
    """Bytes that reach the multiprocessors through the L2 cache in one kernel of FlashAttention-2
    with tiles of Bq queries and Bk keys.

    A program owns a tile of queries (``forward``, ``backward_dq``) or keys (``backward_dkdv``) and
    streams two matrices of the other side past it, each tile once. A tile at a ragged end or on the
    diagonal counts as whole. Streaming gives about ``2 * n_queries * n_keys * d / Bq`` elements
    forward (half if causal): a cache's work, where attention_bytes is that of device memory.

    Raises ValueError as attention_flops, or for an unknown kernel.
    """
    sizes = {"batch": batch, "heads": heads, "n_queries": n_queries, "n_keys": n_keys}
    check_sizes(**sizes, head_dim=head_dim, element_bytes=element_bytes, Bq=Bq, Bk=Bk)
    check_name("kernel", kernel, KERNELS)
    owner, _, own, floats = KERNELS[kernel]
    owned, streamed, length = (Bq, Bk, n_queries) if owner == "queries" else (Bk, Bq, n_keys)
    row = head_dim * element_bytes
    streams = _visits(n_queries, n_keys, causal, Bq, Bk) * streamed * (2 * row + 4 * floats)
    return batch * heads * (streams + -(-length // owned) * owned * own * row)


def _visits(n_queries: int, n_keys: int, causal: bool, Bq: int, Bk: int) -> int:
    """Pairs of tiles of one head in which some query sees some key (key j if j <= i)."""
    key_tiles = -(-n_keys // Bk)
    query_tiles = -(-n_queries // Bq)
    if not causal:
        return query_tiles * key_tiles
    return sum(min(key_tiles, -(-(tile + 1) * Bq // Bk)) for tile in range(query_tiles))


def tiled_memory(
    batch: int,
    heads: int,
    n_queries: int,
    n_keys: int,
    head_dim: int,
    element_bytes: int,
    pass_: str,
    one_sweep: bool = False,
) -> dict[str, int]:
    """Bytes of the tensors a tiled pass allocates, by name: results, and fp32 rows beside them.

    Forward makes ``o`` and the log-sum-exp ``lse``, backward ``dq``, ``dk``, ``dv`` and ``delta``;
    in ``one_sweep`` it makes, for ``delta``, ``rows`` (two numbers a query, of a multiple of 128
    queries) and ``sums``, in which dQ is added up in fp32. end_to_end makes all, and their sum is
    its peak beyond the inputs. Raises ValueError as attention_flops.
    """
    check_name("pass", pass_, PASSES)
    query, key, rows = tensor_bytes(batch, heads, n_queries, n_keys, head_dim, element_bytes)
    forward = {"o": query, "lse": rows}
    backward = {"dq": query, "dk": key, "dv": key}
    if one_sweep:
        backward["rows"] = batch * heads * 2 * (-(-n_queries // 128) * 128) * 4
        backward["sums"] = batch * heads * n_queries * head_dim * 4
    else:
        backward["delta"] = rows
    return {"forward": forward, "backward": backward, "end_to_end": forward | backward}[pass_]


def for_hopper(head_dim: int, element_bytes: int) -> bool:
    """Whether the library has kernels for Hopper for this head: 40 to 128, in steps of 8, in 16
    bits."""
    return element_bytes == 2 and 32 < head_dim <= 128 and head_dim % 8 == 0


def in_one_sweep(n_keys: int, n_heads: int, head_dim: int, element_bytes: int) -> bool:
    """Whether the library's backward is one sweep over the tiles on a Hopper GPU, dQ added up by
    many programs, and not two: where programs of 128 keys fill the GPU or sequences are long
    (measured on an H200)."""
    fills = -(-n_keys // 128) * n_heads >= 264
    return for_hopper(head_dim, element_bytes) and n_keys >= (512 if fills else 1024)


# Eager attention with a causal mask, kernel by kernel: N x N matrices read and written, and how
# often the mask, one byte an element, passes. A row that softmax reads twice counts once.
EAGER = {
    "forward": (
        ("q k^T", 0, 1, 0),
        ("times scale", 1, 1, 0),
        ("indices of queries", 0, 0, 0),
        ("indices of keys", 0, 0, 0),
        ("compare", 0, 0, 1),
        ("copy to mask", 1, 1, 0),
        ("mask", 1, 1, 1),
        ("softmax", 1, 1, 0),
        ("p v", 1, 0, 0),
    ),
    "backward": (
        ("p^T do", 1, 0, 0),
        ("do v^T", 0, 1, 0),
        ("dp times p", 2, 1, 0),
        ("softmax backward", 2, 1, 0),
        ("copy to mask", 1, 1, 0),
        ("mask", 1, 1, 1),
        ("times scale", 1, 1, 0),
        ("ds k", 1, 0, 0),
        ("ds^T q", 1, 0, 0),
    ),
}

# The same as torch.compile leaves it: between two products one kernel, in place, that computes the
# mask itself. Then the (batch, N, d) tensors that a product passes beside its matrix.
COMPILED = {
    "forward": (("q k^T", 0, 1, 0), ("softmax", 1, 1, 0), ("p v", 1, 0, 0)),
    "backward": (
        ("p^T do", 1, 0, 0),
        ("do v^T", 0, 1, 0),
        ("softmax backward", 2, 1, 0),
        ("ds k", 1, 0, 0),
        ("ds^T q", 1, 0, 0),
    ),
}
COMPILED_ROWS = {
    "q k^T": (2, 0),
    "p v": (1, 1),
    "p^T do": (1, 1),
    "do v^T": (2, 0),
    "ds k": (1, 1),
    "ds^T q": (1, 1),
}

"""FLOPs and bytes of attention, and the rules by which a2lib chooses a kernel.

FLOPs follow the convention of the FlashAttention papers (FlashAttention-2, section 4.1;
FlashAttention-3, section 4.1): two per multiply-add of the matmuls alone, half of them if the mask
is causal, whatever the block size. The forward has two matmuls, the backward five.

The thresholds of the rules were measured on an H200.
"""

import math

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
    query, key, lse = tensor_bytes(batch, heads, n_queries, n_keys, head_dim, element_bytes)
    forward = 2 * query + 2 * key + lse
    backward = 4 * query + 4 * key + lse
    return {"forward": forward, "backward": backward, "end_to_end": forward + backward}[pass_]


def tensor_bytes(
    batch: int, heads: int, n_queries: int, n_keys: int, head_dim: int, element_bytes: int
) -> tuple[int, int, int]:
    """Return the bytes of q, o, do or dq; of k, v, dk or dv; and of a float32 for each query, as
    the log-sum-exp has. Raises ValueError for sizes that are not positive integers."""
    check_sizes(batch=batch, heads=heads, n_queries=n_queries, n_keys=n_keys)
    check_sizes(head_dim=head_dim, element_bytes=element_bytes)
    queries, keys = batch * heads * n_queries, batch * heads * n_keys
    row = head_dim * element_bytes
    return queries * row, keys * row, queries * WIDE


def for_hopper(head_dim: int, element_bytes: int) -> bool:
    """Return whether a2lib has kernels for Hopper for this head: 40 to 128, in steps of 8, in 16
    bits."""
    return element_bytes == 2 and 32 < head_dim <= 128 and head_dim % 8 == 0


def in_one_sweep(n_keys: int, n_heads: int, head_dim: int, element_bytes: int) -> bool:
    """Return whether the backward on a Hopper GPU is one sweep over the tiles, in which many
    programs add to dQ, instead of two: if programs of 128 keys fill the GPU, or sequences are
    long."""
    fills = -(-n_keys // 128) * n_heads >= 264
    return for_hopper(head_dim, element_bytes) and n_keys >= (128 if fills else 1024)


def in_one_launch(
    n_queries: int, n_keys: int, n_heads: int, head_dim: int, element_bytes: int
) -> bool:
    """Return whether the backward is one launch, in which programs of 64 queries (16 with heads
    above 64) make dQ and programs of as many keys make dK and dV: in 16 bits, if each program has
    an SM and tokens are so few that launching takes longest."""
    most = 128 if 32 < head_dim <= 64 else 256
    rows = 64 if head_dim <= 64 else 16
    programs = (-(-n_queries // rows) + -(-n_keys // rows)) * n_heads
    few = max(n_queries, n_keys) <= most and programs <= MULTIPROCESSORS
    return element_bytes == 2 and few


def in_chunks(n_keys: int, n_heads: int, head_dim: int, causal: bool, element_bytes: int) -> bool:
    """Return whether the backward is one sweep split by queries, in which all gradients are added
    up.

    In 16 bits it is where programs of 128 keys would leave a GPU idle. In fp32, with heads of up to
    64, it is there and where rows are long. Long causal rows in 16 bits, whose first program takes
    longest, are also split where each SM has a program, or two with heads up to 32.
    """
    programs = -(-n_keys // 128) * n_heads
    if element_bytes == 4:
        return head_dim <= 64 and n_keys >= 256 and (programs <= 128 or n_keys >= 4096)
    if head_dim <= 32:
        most = 128
    elif head_dim <= 64 or causal:
        most = 64
    else:
        most = 32
    if causal and n_keys > 16384 and head_dim <= 32:
        most = 256
    elif causal and long_for_hopper(n_keys, head_dim, element_bytes):
        most = MULTIPROCESSORS
    return element_bytes == 2 and n_keys >= 256 and programs <= most


def in_two_terms(n_queries: int, n_keys: int, head_dim: int, element_bytes: int) -> bool:
    """Return whether both passes multiply fp32 as two terms of fp16 (three matmuls) instead of
    three of bf16 (six): with heads above 64, except where sums have so few rows that gradients
    would be further from fp32's. The backward is then one sweep split by queries."""
    return element_bytes == 4 and head_dim > 64 and min(n_queries, n_keys) >= 256


def terms_shape(n_rows: int, head_dim: int) -> tuple[int, int]:
    """Return the rows and columns that the two fp16 terms of a head's rows take: blocks of 128 rows
    and, behind them, an exponent for each block. A term's columns are a multiple of 8 (16
    bytes)."""
    blocks, columns = -(-n_rows // 128), 2 * (-(-head_dim // 8) * 8)
    return blocks * 128 + -(-blocks // columns), columns


def long_for_hopper(n_keys: int, head_dim: int, element_bytes: int) -> bool:
    """Return whether a backward split by queries uses the Hopper kernel where that can run. Shorter
    rows use the plain Triton kernel, whose tiles are smaller."""
    return for_hopper(head_dim, element_bytes) and n_keys >= (8192 if head_dim <= 64 else 4096)


CHUNKS_MAX = 8
MULTIPROCESSORS = 132  # of an H100 or H200


def keys_per_chunk(
    n_queries: int,
    n_keys: int,
    n_heads: int,
    causal: bool,
    element_bytes: int,
    multiprocessors: int = MULTIPROCESSORS,
) -> int:
    """Return the keys of a program, a multiple of 128, if the forward splits the keys over several
    programs (split-KV); 0 if it does not, since tiles of 64 queries fill the GPU or rows are short.

    Work is counted in tiles of 64 by 64, which an SM does at one rate. There are at most CHUNKS_MAX
    chunks, each of which holds an fp32 output of all queries.
    """
    n_keys = min(n_keys, n_queries) if causal else n_keys
    tiles, blocks = -(-n_queries // 64) * n_heads, -(-n_keys // 64)
    if not 0 < tiles <= 2 * multiprocessors:
        return 0
    share = tiles * blocks / multiprocessors / (2 if causal else 1)
    # Of the SM with the most work, if keys are not split: its second tile is shorter if causal.
    second = max(0, 1 - multiprocessors / tiles) if causal else tiles > multiprocessors
    fullest = blocks * (1 + second)
    # The cost of the second kernel, and from 32 tiles on of doing without the Hopper kernel.
    few = 6 if element_bytes == 2 else 2
    if fullest <= 1.25 * share + (few if tiles < 32 else 10):
        return 0
    # Some four programs for each SM, or two with a causal mask, which leaves half of the pairs.
    chunks = 4 * multiprocessors / tiles
    chunks = min(CHUNKS_MAX, max(4, round(chunks)) if causal else max(2, math.ceil(chunks)))
    keys = -(-n_keys // (chunks * 128)) * 128
    return keys if keys < n_keys else 0


def n_chunks_of(chunk_keys: int, n_queries: int, n_keys: int, causal: bool) -> int:
    """Return how many chunks have a key that some query sees."""
    seen = min(n_queries, n_keys) if causal else n_keys
    return -(-seen // chunk_keys)

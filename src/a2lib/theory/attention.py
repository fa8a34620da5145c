"""Operations and bytes of attention, counted.

Operations follow the convention of the FlashAttention papers (FlashAttention-2, section 4.1;
FlashAttention-3, section 4.1): two per multiply-add of the matrix products alone, half of them if
the mask is causal whatever the block size, and a backward of five products to the forward's two.
"""

import math

from a2lib.checks import check_name, check_sizes

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


# kernel of one sweep: who owns a program, and matrices of the owner's rows that are read or written
# once.
KERNELS = {"forward": ("queries", 2), "backward": ("keys", 4)}


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

    A program owns a tile of queries (``forward``) or keys (``backward``, in one sweep) and streams
    two matrices of the other side past it, each tile once; the backward two fp32 numbers a query
    beside them, and what it adds to dQ in fp32. A tile at a ragged end or on the diagonal counts as
    whole. Streaming gives about ``2 * n_queries * n_keys * d / Bq`` elements forward (half if
    causal): a cache's work, where attention_bytes is that of device memory.

    Raises ValueError as attention_flops, or for an unknown kernel.
    """
    sizes = {"batch": batch, "heads": heads, "n_queries": n_queries, "n_keys": n_keys}
    check_sizes(**sizes, head_dim=head_dim, element_bytes=element_bytes, Bq=Bq, Bk=Bk)
    check_name("kernel", kernel, KERNELS)
    owner, own = KERNELS[kernel]
    owned, streamed, length = (Bq, Bk, n_queries) if owner == "queries" else (Bk, Bq, n_keys)
    row, sums = head_dim * element_bytes, 0 if owner == "queries" else 4 * (2 + head_dim)
    # Pairs of tiles of one head in which some query sees some key (key j if j <= i).
    query_tiles, key_tiles = -(-n_queries // Bq), -(-n_keys // Bk)
    seen = [-(-(tile + 1) * Bq // Bk) if causal else key_tiles for tile in range(query_tiles)]
    streams = sum(min(key_tiles, n) for n in seen) * streamed * (2 * row + sums)
    return batch * heads * (streams + -(-length // owned) * owned * own * row)


def tiled_memory(
    batch: int,
    heads: int,
    n_queries: int,
    n_keys: int,
    head_dim: int,
    element_bytes: int,
    pass_: str,
    one_sweep: bool = False,
    query_chunks: bool = False,
    key_chunks: int = 0,
    terms: bool = False,
) -> dict[str, int]:
    """Bytes of the tensors a tiled pass allocates, by name: results, and fp32 rows beside them.

    Forward makes ``o`` and the log-sum-exp ``lse``, and both in fp32 for each of ``key_chunks``
    (``parts``, ``part_lse``); backward ``dq``, ``dk``, ``dv`` and ``delta``; in ``one_sweep`` it
    makes, for ``delta``, ``rows`` (two numbers a query, of a multiple of 128 queries) and ``sums``,
    in which dQ is added up in fp32, in whole tiles of 128 columns where heads are above 64; in
    ``query_chunks``, which are one sweep too, ``rows`` and sums of all three gradients. With
    ``terms``, which the library's fp32 multiplies, each pass makes three of bf16 an element of k
    and v, the backward of q and do too; ``in_two_terms`` two of fp16, and the backward is in
    query_chunks. Parts and the forward's terms go before the backward: end_to_end has what is there
    when most is, and their sum is its peak beyond the inputs. Raises ValueError as attention_flops.
    """
    check_name("pass", pass_, PASSES)
    query, key, rows = tensor_bytes(batch, heads, n_queries, n_keys, head_dim, element_bytes)
    two_terms = terms and in_two_terms(n_queries, n_keys, head_dim, element_bytes)
    query_chunks = query_chunks or two_terms
    forward = {"o": query, "lse": rows}
    backward = {"dq": query, "dk": key, "dv": key}
    padded, wide = -(-n_queries // 128) * 128, batch * heads * head_dim * 4
    if one_sweep or query_chunks:
        backward["rows"] = batch * heads * 2 * padded * 4
    hopper = one_sweep or long_for_hopper(n_keys, head_dim, element_bytes)
    tiles = batch * heads * padded * 128 * 4
    sums = tiles if hopper and head_dim > 64 else wide * n_queries
    if query_chunks:
        backward |= {"dq_sums": sums, "dk_sums": wide * n_keys}
        backward["dv_sums"] = backward["dk_sums"]
    elif one_sweep:
        backward["sums"] = sums
    else:
        backward["delta"] = rows
    if terms:
        split = {"k_terms": n_keys, "v_terms": n_keys, "q_terms": n_queries, "do_terms": n_queries}
        for name, n in split.items():
            size = math.prod(terms_shape(n, head_dim)) if two_terms else 3 * n * head_dim
            backward[name] = batch * heads * size * 2
    end_to_end = forward | backward
    if terms:
        forward |= {name: backward[name] for name in ("k_terms", "v_terms")}
    if key_chunks:
        forward |= {"parts": key_chunks * rows * head_dim, "part_lse": key_chunks * rows}
        end_to_end = max(forward, end_to_end, key=lambda held: sum(held.values()))
    return {"forward": forward, "backward": backward, "end_to_end": end_to_end}[pass_]


def for_hopper(head_dim: int, element_bytes: int) -> bool:
    """Whether the library has kernels for Hopper for this head: 40 to 128, in steps of 8, in 16
    bits."""
    return element_bytes == 2 and 32 < head_dim <= 128 and head_dim % 8 == 0


def in_one_sweep(n_keys: int, n_heads: int, head_dim: int, element_bytes: int) -> bool:
    """Whether the library's backward is one sweep over the tiles on a Hopper GPU, dQ added up by
    many programs, and not two: where programs of 128 keys fill the GPU or sequences are long
    (measured on an H200)."""
    fills = -(-n_keys // 128) * n_heads >= 264
    return for_hopper(head_dim, element_bytes) and n_keys >= (128 if fills else 1024)


def in_one_launch(
    n_queries: int, n_keys: int, n_heads: int, head_dim: int, element_bytes: int
) -> bool:
    """Whether the library's backward is one launch, in which programs of 64 queries make dQ and
    programs of 64 keys dK and dV, of 16 with heads above 64: in 16 bits, where tokens are so few
    that launching takes longest (measured on an H200, one head) and each program has a
    multiprocessor."""
    most = 128 if 32 < head_dim <= 64 else 256
    rows = 64 if head_dim <= 64 else 16
    programs = (-(-n_queries // rows) + -(-n_keys // rows)) * n_heads
    few = max(n_queries, n_keys) <= most and programs <= MULTIPROCESSORS
    return element_bytes == 2 and few


def in_chunks(n_keys: int, n_heads: int, head_dim: int, causal: bool, element_bytes: int) -> bool:
    """Whether the library's backward is one sweep whose programs have a chunk of the queries each,
    so that all gradients are added up: in 16 bits, where programs of 128 keys would leave a GPU
    idle; in fp32, with heads of up to 64, there too and where rows are long (measured on an
    H200). Long causal rows of 16 bits, whose first program takes longest, are cut also where there
    is a program for each multiprocessor, with heads up to 32 two."""
    programs = -(-n_keys // 128) * n_heads
    if element_bytes == 4:
        return head_dim <= 64 and n_keys >= 256 and (programs <= 128 or n_keys >= 4096)
    most = 128 if head_dim <= 32 else 64 if head_dim <= 64 or causal else 32
    if causal and n_keys > 16384 and head_dim <= 32:
        most = 256
    elif causal and long_for_hopper(n_keys, head_dim, element_bytes):
        most = MULTIPROCESSORS
    return element_bytes == 2 and n_keys >= 256 and programs <= most


def cut_in_chunks(
    n_queries: int, n_keys: int, n_heads: int, head_dim: int, causal: bool, element_bytes: int
) -> bool:
    """``in_chunks``, but where the backward is in_one_launch."""
    one = in_one_launch(n_queries, n_keys, n_heads, head_dim, element_bytes)
    return in_chunks(n_keys, n_heads, head_dim, causal, element_bytes) and not one


def in_two_terms(n_queries: int, n_keys: int, head_dim: int, element_bytes: int) -> bool:
    """Whether the library multiplies fp32 as two terms of fp16 (three products) and not three of
    bf16 (six), in both passes: with heads of more than 64, but where sums are of so few rows that
    gradients would be further from fp32's (measured on an H200). The backward is then one sweep in
    chunks."""
    return element_bytes == 4 and head_dim > 64 and min(n_queries, n_keys) >= 256


def terms_shape(n_rows: int, head_dim: int) -> tuple[int, int]:
    """Rows and columns that the two fp16 terms of a head's n_rows take: blocks of 128, and behind
    them an exponent for each; each term with columns up to a multiple of 8, or 16 bytes."""
    blocks, columns = -(-n_rows // 128), 2 * (-(-head_dim // 8) * 8)
    return blocks * 128 + -(-blocks // columns), columns


def long_for_hopper(n_keys: int, head_dim: int, element_bytes: int) -> bool:
    """Whether a backward in chunks is the Hopper kernel's where that can run: shorter rows are
    plain Triton's, whose tiles are smaller (measured on an H200)."""
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
    """Keys that a program of the library's forward takes where several share those of a query, a
    multiple of 128; 0 where they do not: where tiles of 64 queries fill the GPU, or rows are short.

    Work is counted in tiles of 64 by 64, which a multiprocessor does at one rate. There are at
    most CHUNKS_MAX chunks, each of which holds an fp32 output of all queries.
    """
    n_keys = min(n_keys, n_queries) if causal else n_keys
    tiles, blocks = -(-n_queries // 64) * n_heads, -(-n_keys // 64)
    if not 0 < tiles <= 2 * multiprocessors:
        return 0
    share = tiles * blocks / multiprocessors / (2 if causal else 1)
    # The fullest multiprocessor's, unshared: its second tile is then shorter, if causal.
    second = max(0, 1 - multiprocessors / tiles) if causal else tiles > multiprocessors
    fullest = blocks * (1 + second)
    # What the second kernel takes, and the first more than ours of Hopper, which has from 32 tiles
    # on, for the same work.
    few = 6 if element_bytes == 2 else 2
    if fullest <= 1.25 * share + (few if tiles < 32 else 10):
        return 0
    # Some four programs for each multiprocessor, two with a causal mask, which leaves half of the
    # pairs (measured on an H200).
    chunks = 4 * multiprocessors / tiles
    chunks = min(CHUNKS_MAX, max(4, round(chunks)) if causal else max(2, math.ceil(chunks)))
    keys = -(-n_keys // (chunks * 128)) * 128
    return keys if keys < n_keys else 0


def n_chunks_of(chunk_keys: int, n_queries: int, n_keys: int, causal: bool) -> int:
    """Chunks that some query sees a key of."""
    return -(-(min(n_queries, n_keys) if causal else n_keys) // chunk_keys)

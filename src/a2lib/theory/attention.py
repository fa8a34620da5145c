"""Operations and bytes of attention, counted.

Operations follow the convention of the FlashAttention papers (FlashAttention-2, section 4.1;
FlashAttention-3, section 4.1): two per multiply-add of the matrix products alone, half of them if
the mask is causal whatever the block size, and a backward of five products to the forward's two.
"""

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
    terms: int = 0,
    whole_tiles: bool = False,
) -> dict[str, int]:
    """Bytes of the tensors a tiled pass allocates, by name: results, and fp32 rows beside them.

    Forward makes ``o`` and the log-sum-exp ``lse``, and both in fp32 for each of ``key_chunks``
    (``parts``, ``part_lse``); backward ``dq``, ``dk``, ``dv`` and ``delta``; in ``one_sweep`` it
    makes, for ``delta``, ``rows`` (two numbers a query, of a multiple of 128 queries) and ``sums``,
    in which dQ is added up in fp32; in ``query_chunks``, which are one sweep too, ``rows`` and sums
    of all three gradients. Those of dQ are of ``whole_tiles``, 128 by 128, where the kernel for
    Hopper adds them up with heads above 64. With ``terms`` fp32 is multiplied as so many of 16
    bits: each pass makes those of k and v, the backward of q and do too. Parts and the forward's
    terms go before the backward: end_to_end has what is there when most is, and their sum is its
    peak beyond the inputs. Raises ValueError as attention_flops.
    """
    check_name("pass", pass_, PASSES)
    query, key, rows = tensor_bytes(batch, heads, n_queries, n_keys, head_dim, element_bytes)
    forward = {"o": query, "lse": rows}
    backward = {"dq": query, "dk": key, "dv": key}
    padded, wide = -(-n_queries // 128) * 128, batch * heads * head_dim * 4
    if one_sweep or query_chunks:
        backward["rows"] = batch * heads * 2 * padded * 4
    sums = batch * heads * padded * 128 * 4 if whole_tiles else wide * n_queries
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
            backward[name] = batch * heads * _term_elements(n, head_dim, terms) * 2
    end_to_end = forward | backward
    if terms:
        forward |= {name: backward[name] for name in ("k_terms", "v_terms")}
    if key_chunks:
        forward |= {"parts": key_chunks * rows * head_dim, "part_lse": key_chunks * rows}
        end_to_end = max(forward, end_to_end, key=lambda held: sum(held.values()))
    return {"forward": forward, "backward": backward, "end_to_end": end_to_end}[pass_]


def _term_elements(n_rows: int, head_dim: int, terms: int) -> int:
    """Elements of all terms of n_rows: three have the rows' sizes; two have blocks of 128 rows, an
    exponent for each behind them, and columns up to a multiple of 8."""
    if terms != 2:
        return terms * n_rows * head_dim
    blocks, columns = -(-n_rows // 128), 2 * (-(-head_dim // 8) * 8)
    return (blocks * 128 + -(-blocks // columns)) * columns

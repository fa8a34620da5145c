"""FLOPs and bytes of attention.

FLOPs follow the FlashAttention papers (FlashAttention-2, section 4.1; FlashAttention-3, section
4.1): two per multiply-add of the matmuls, half of them with a causal mask whatever the tile size,
and five matmuls in the backward to two in the forward.
"""

from a2lib.theory.products import check_name, check_sizes

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
    """Return the fewest bytes that one attention call reads and writes in device memory.

    The forward reads q, k, v and writes o and the float32 log-sum-exp. The backward reads those
    five and do, and writes dq, dk, dv. end_to_end is both. With attention_flops this gives the
    least time: the larger of FLOPs over the peak rate and bytes over the bandwidth. Raises
    ValueError as attention_flops.
    """
    check_name("pass", pass_, PASSES)
    query, key, lse = tensor_bytes(batch, heads, n_queries, n_keys, head_dim, element_bytes)
    forward = 2 * query + 2 * key + lse
    backward = 4 * query + 4 * key + lse
    return {"forward": forward, "backward": backward, "end_to_end": forward + backward}[pass_]


def tensor_bytes(
    batch: int, heads: int, n_queries: int, n_keys: int, head_dim: int, element_bytes: int
) -> tuple[int, int, int]:
    """Return the bytes of q, o, do or dq; of k, v, dk or dv; and of one float32 per query, such as
    the log-sum-exp. Raises ValueError for sizes that are not positive integers."""
    sizes = {"batch": batch, "heads": heads, "n_queries": n_queries, "n_keys": n_keys}
    check_sizes(**sizes, head_dim=head_dim, element_bytes=element_bytes)
    rows, row = batch * heads, head_dim * element_bytes
    return rows * n_queries * row, rows * n_keys * row, rows * n_queries * 4


# For each kernel, the side of which a program owns a tile, and how many matrices of that side it
# reads or writes once.
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
    """Return the bytes that reach the SMs through the L2 cache in one kernel of FlashAttention-2
    with tiles of Bq queries and Bk keys.

    A program owns a tile of queries (``forward``) or keys (``backward``, in one sweep) and streams
    the tiles of two matrices of the other side. The backward also streams two fp32 numbers per
    query, and adds to dQ in fp32. A tile at a ragged end or on the diagonal counts as whole. The
    forward streams about ``2 * n_queries * n_keys * d / Bq`` elements (half if causal).
    attention_bytes counts device memory instead.

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
    """Return the bytes of the tensors that a tiled pass allocates, by name.

    The forward makes ``o`` and the log-sum-exp ``lse``, the backward ``dq``, ``dk``, ``dv`` and
    ``delta``. The options add or replace some:

    one_sweep: instead of ``delta``, ``rows`` (two numbers per query, for a multiple of 128 queries)
        and ``sums``, in which dQ is added up in fp32
    query_chunks: one sweep, split by queries: ``rows``, and sums of all three gradients
    key_chunks: split-KV: the forward's ``o`` and ``lse`` in fp32 for each chunk (``parts``,
        ``part_lse``)
    terms: fp32 emulated by so many 16-bit terms: each pass makes those of k and v, and the backward
        those of q and do
    whole_tiles: sums of dQ in tiles of 128 by 128, as the Hopper kernel has them with heads above
        64

    Parts and the forward's terms are freed before the backward. end_to_end has the tensors at the
    peak. Raises ValueError as attention_flops.
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
    """Return the elements of all terms of ``n_rows``. Three terms have the rows' sizes; two have
    blocks of 128 rows, an exponent for each after them, and columns up to a multiple of 8."""
    if terms != 2:
        return terms * n_rows * head_dim
    blocks, columns = -(-n_rows // 128), 2 * (-(-head_dim // 8) * 8)
    return (blocks * 128 + -(-blocks // columns)) * columns

"""The forward where query tiles are too few for the GPU: a row's keys shared among programs.

``chunk_kernel`` is the forward of ``kernels.py`` over a chunk of keys: each program leaves the
output and log-sum-exp that its queries would have if there were no other keys. ``combine_kernel``
weighs them: with ``lse = log(sum(exp(lse_c)))`` over the chunks c, ``o = sum(exp(lse_c - lse) *
o_c)``. It adds in the order of the chunks, so that outputs are the same bits every run.

Source: Flash-Decoding (Dao et al., 2023).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from a2lib.attention.kernels import LN2, LOG2E, SIZES, forward_rows, visible_keys
from a2lib.attention.operands import float32, load_rows, store_rows


@triton.jit
def _tile_and_chunk(item, n_tiles, n_chunks, tiles_per_chunk):
    """Return the pair of a head's program: the whole chunks first, then those on the diagonal, of
    which a tile has one each, the longest first."""
    chunk = 0
    for c in range(1, n_chunks):
        # Before chunk c: all pairs of a chunk and a tile behind its diagonal.
        chunk += tl.where(item >= c * n_tiles - tiles_per_chunk * c * (c + 1) // 2, 1, 0)
    at = item - (chunk * n_tiles - tiles_per_chunk * chunk * (chunk + 1) // 2)
    tile = n_tiles - 1 - at
    # Behind all of the last chunk.
    diagonal = at - tl.maximum(n_tiles - n_chunks * tiles_per_chunk, 0)
    if (chunk == n_chunks - 1) & (diagonal >= 0):
        chunk = diagonal % n_chunks
        tile = (chunk + 1) * tiles_per_chunk - 1 - diagonal // n_chunks
    return tile, chunk


@triton.jit(do_not_specialize=[*SIZES, "n_chunks", "chunk_keys"])
def chunk_kernel(
    Q, K, V, PARTS, LSE, stride_q, stride_k, stride_v,
    scale, H, n_heads_total, GROUP, Nq, Nk, n_chunks, chunk_keys,
    d: tl.constexpr, BD: tl.constexpr, Bq: tl.constexpr, Bk: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """PARTS and LSE of the queries over one chunk of keys: one program per (query tile, chunk,
    head) that sees any.

    Q: (B, H, Nq, d); K, V: (B, H / GROUP, Nk, d); PARTS: (n_chunks, B H, Nq, d) and LSE:
    (n_chunks, B H, Nq), contiguous fp32, in which is not written what lies behind the diagonal. A
    chunk has chunk_keys keys, a multiple of Bq and Bk.
    """
    if EARLY:
        gdc_launch_dependents()
    bh = tl.program_id(0) % n_heads_total
    n_tiles = tl.cdiv(Nq, Bq)
    tiles_per_chunk = chunk_keys // Bq if CAUSAL else 0
    item = tl.program_id(0) // n_heads_total
    tile, chunk = _tile_and_chunk(item, n_tiles, n_chunks, tiles_per_chunk)
    if tile < n_tiles:
        b = (bh // H).to(tl.int64)
        h = (bh % H).to(tl.int64)
        row = (tl.cast(chunk, tl.int64) * n_heads_total + bh) * Nq
        Q += b * stride_q[0] + h * stride_q[1]
        K += b * stride_k[0] + (h // GROUP) * stride_k[1]
        V += b * stride_v[0] + (h // GROUP) * stride_v[1]
        first = chunk * chunk_keys
        whole, stop = visible_keys(tile * Bq, Nk, Bq, Bk, CAUSAL, "edges")
        whole = tl.maximum(tl.minimum(whole, first + chunk_keys), first)
        stop = tl.minimum(stop, first + chunk_keys)
        forward_rows(
            Q, K, V, PARTS + row * d, LSE + row, stride_q[2], stride_k[2], stride_v[2], d,
            tile * Bq, first, whole, stop, Nq, Nk, float32(scale),
            Bq, Bk, d, BD, CAUSAL, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["H", "n_heads_total", "Nq", "n_chunks", "chunk_keys"])
def combine_kernel(
    PARTS, LSES, O, LSE, stride_o, H, n_heads_total, Nq, n_chunks, chunk_keys,
    d: tl.constexpr, BD: tl.constexpr, B: tl.constexpr, CHUNKS: tl.constexpr,
    CAUSAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """O: (B, H, Nq, d) and LSE: (B, H, Nq) contiguous fp32, of PARTS and LSES as ``chunk_kernel``
    leaves them: one program per B queries of a head, B a divisor of chunk_keys. n_chunks is at most
    CHUNKS, a power of two."""
    n_tiles = tl.cdiv(Nq, B)
    bh = (tl.program_id(0) // n_tiles).to(tl.int64)
    m0 = tl.program_id(0) % n_tiles * B
    if CAUSAL:
        # Of a chunk all these queries see a key, or none does.
        n_chunks = tl.minimum(n_chunks, m0 // chunk_keys + 1)
    if EARLY:
        gdc_wait()
    rows = n_heads_total * tl.cast(Nq, tl.int64)
    offs_m = m0 + tl.arange(0, B)
    chunks = tl.arange(0, CHUNKS)
    there = (offs_m < Nq)[:, None] & (chunks < n_chunks)[None, :]
    at = bh * Nq + offs_m[:, None] + chunks[None, :] * rows
    lses = tl.load(LSES + at, mask=there, other=float("-inf"))
    # Where no chunk has a score above -inf: -inf - -inf would be NaN.
    m = tl.max(lses, 1)
    m = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.math.exp2((lses - m[:, None]) * LOG2E), 1)
    lse = m + tl.math.log2(tl.where(l == 0.0, 1.0, l)) * LN2
    acc = tl.zeros([B, BD], tl.float32)
    for c in tl.static_range(CHUNKS):
        row = bh * Nq + c * rows
        n_rows = tl.where(c < n_chunks, Nq, 0)
        part = load_rows(PARTS + row * d, m0, n_rows, d, B, d, BD, True)
        lse_c = tl.load(LSES + row + offs_m, mask=offs_m < n_rows, other=float("-inf"))
        acc += part * tl.math.exp2((lse_c - lse) * LOG2E)[:, None]
    O += (bh // H) * stride_o[0] + (bh % H) * stride_o[1]
    store_rows(O, acc, m0, Nq, stride_o[2], B, d, BD)
    tl.store(LSE + bh * Nq + offs_m, tl.where(l == 0.0, float("-inf"), lse), mask=offs_m < Nq)

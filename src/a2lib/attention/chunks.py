"""The backward where tiles are few, in plain Triton: one sweep, cut into chunks of queries.

One head of a few thousand tokens has fewer key tiles than a GPU has multiprocessors, and with a
causal mask the first of them is the longest; in fp32 one sweep pays for long rows too. Here a
program owns a key tile and a chunk of queries; what it finds is added to fp32 sums: dQ tile by
tile, dK and dV at its end. The order of additions, and with it the last bits, differ from run to
run. On Hopper the Gluon kernel cuts long rows of 16 bits so. The legend is that of ``kernels.py``.

In fp32 heads of 65 to 128 have a kernel of their own, of two fp16 terms (``terms.py``): six
products leave no tile that fits. dV is apart from dK and dQ, or their sums would not fit the
registers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from a2lib.attention import terms
from a2lib.attention.kernels import LOG2E, ROWS_TO, SIZES, _exp
from a2lib.attention.operands import dot, float32, int64, load, operand


@triton.jit
def _add_rows(ptr, x, row0, n_rows, B: tl.constexpr, d: tl.constexpr, BD: tl.constexpr):
    """Add x to rows ``row0 .. row0 + B`` of a contiguous (n_rows, d) matrix, in one piece each
    element."""
    offs_r = tl.arange(0, B)
    offs_d = tl.arange(0, BD)
    ptrs = ptr + int64(row0) * d + offs_r[:, None] * d + offs_d[None, :]
    mask = (row0 + offs_r < n_rows)[:, None]
    if d != BD:
        mask = mask & (offs_d < d)[None, :]
    tl.atomic_add(ptrs, x, mask=mask, sem="relaxed")


@triton.jit
def _turned(x, PRECISION: tl.constexpr):
    """Return the transpose of an operand."""
    if PRECISION == "bf16x6":
        return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])
    else:
        return (tl.trans(x[0]),)


@triton.jit
def _key_numbers(n0, Nk, Bk: tl.constexpr):
    """Return the keys of a tile. One past Nk is later than every query: its weight may be
    infinite, and dQ would have it."""
    offs_n = n0 + tl.arange(0, Bk)
    return tl.where(offs_n < Nk, offs_n, 2**31 - 1)


@triton.jit
def _without_hidden(pt, m0, offs_n, Nk, Bq: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the transposed weights of a tile, 0 where a query does not see the key."""
    if CAUSAL:
        # Constants on one side: registers are short.
        pt = tl.where((offs_n - m0)[:, None] <= tl.arange(0, Bq)[None, :], pt, 0.0)
    else:
        pt = tl.where((offs_n < Nk)[:, None], pt, 0.0)
    return pt


@triton.jit
def _tile_and_queries(
    item, Nq, Nk, chunk, Bq: tl.constexpr, Bk: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return a program's key tile, and the ends of its queries.

    With a causal mask the chunks that see the whole tile come first, and those on the diagonal,
    which are shorter, last.
    """
    n_tiles = tl.cdiv(Nk, Bk)
    if CAUSAL:
        n_chunks = tl.cdiv(Nq, chunk)
        per_chunk = chunk // Bk
        later = 1  # by how many chunks the queries come after the keys
        n_seen = tl.minimum(n_tiles, per_chunk * (n_chunks - later))
        while item >= n_seen and later < n_chunks:
            item -= n_seen
            later += 1
            n_seen = tl.minimum(n_tiles, per_chunk * (n_chunks - later))
        tile = item
        first = (tile // per_chunk + later % n_chunks) * (chunk // Bq)
        start = tl.maximum(first, tile * Bk // Bq)
    else:
        tile = item % n_tiles
        first = item // n_tiles * (chunk // Bq)
        start = first
    return tile, start, tl.minimum(first + chunk // Bq, tl.cdiv(Nq, Bq))


@triton.jit
def _chunk_tiles(
    dk, dv, k, v, Q, DO, ROWS, DQ, stride_qn, stride_don,
    n0, start, stop, jump, skip, Nq, Nk, n_rows, scale,
    Bq: tl.constexpr, Bk: tl.constexpr, d: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK / scale and dV of one key tile over query tiles, and with dK dQ / scale of each added to
    DQ."""
    offs_n = _key_numbers(n0, Nk, Bk)
    for i in tl.range(start, stop, num_stages=STAGES):
        m0 = i * Bq
        if skip is not None:
            m0 += tl.where(i >= jump, skip, 0) * Bq
        offs_m = m0 + tl.arange(0, Bq)
        q = load(Q, m0, Nq, stride_qn, Bq, d, BD, MASK, PRECISION)
        do = load(DO, m0, Nq, stride_don, Bq, d, BD, MASK, PRECISION)
        lse = tl.load(ROWS + offs_m)
        st = dot(k, q, PRECISION, True)
        delta = tl.load(ROWS + n_rows + offs_m)
        dpt = dot(v, do, PRECISION, True)
        pt = _exp(st, lse[None, :], scale, PRECISION)
        pt = _without_hidden(pt, m0, offs_n, Nk, Bq, MASK and CAUSAL)
        p = operand(pt, Q.dtype.element_ty, PRECISION)
        dst = operand(pt * (dpt - delta[None, :]), Q.dtype.element_ty, PRECISION)
        dv = dot(p, do, PRECISION, False, dv)
        dk = dot(dst, q, PRECISION, False, dk)
        if Bq < 64:  # fewer rows than the tensor cores' 64
            dq = tl.trans(dot(_turned(k, PRECISION), dst, PRECISION))
        else:
            dq = dot(_turned(dst, PRECISION), k, PRECISION)
        _add_rows(DQ, dq, m0, Nq, Bq, d, BD)
    return dk, dv


@triton.jit(do_not_specialize=[*SIZES, "chunk"])
def backward_chunks_kernel(
    Q, K, V, DO, ROWS, DQ, DK, DV, stride_q, stride_k, stride_v, stride_do,
    scale, H, n_heads_total, GROUP, Nq, Nk, chunk,
    d: tl.constexpr, BD: tl.constexpr, Bq: tl.constexpr, Bk: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    LOOPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add up dQ / scale, dK / scale and dV in DQ, DK and DV: a program per (key tile, chunk of
    queries, query head).

    DQ: (B H, Nq, d), DK, DV: (B H / GROUP, Nk, d), contiguous fp32 zeros; ROWS as
    ``prepare_kernel`` makes it. chunk is a multiple of Bq and of Bk. With two LOOPS tiles
    that need no mask have one of their own.
    """
    scale = float32(scale)
    item = tl.program_id(0) // n_heads_total
    bh = tl.program_id(0) % n_heads_total
    tile, start, stop = _tile_and_queries(item, Nq, Nk, chunk, Bq, Bk, CAUSAL)
    n_rows = tl.cdiv(Nq, ROWS_TO) * ROWS_TO
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    n0 = tile * Bk
    Q += b * stride_q[0] + h * stride_q[1]
    K += b * stride_k[0] + (h // GROUP) * stride_k[1]
    V += b * stride_v[0] + (h // GROUP) * stride_v[1]
    DO += b * stride_do[0] + h * stride_do[1]
    ROWS += (b * H + h) * 2 * n_rows
    DQ += (b * H + h) * Nq * d
    kv_row = (b * (H // GROUP) + h // GROUP) * Nk * d
    k = load(K, n0, Nk, stride_k[2], Bk, d, BD, True, PRECISION)
    v = load(V, n0, Nk, stride_v[2], Bk, d, BD, True, PRECISION)
    dk = tl.zeros([Bk, BD], tl.float32)
    dv = tl.zeros([Bk, BD], tl.float32)
    if EARLY:
        gdc_wait()
    if LOOPS == 1:
        dk, dv = _chunk_tiles(
            dk, dv, k, v, Q, DO, ROWS, DQ, stride_q[2], stride_do[2],
            n0, start, stop, None, None, Nq, Nk, n_rows, scale,
            Bq, Bk, d, BD, CAUSAL, True, PRECISION, STAGES,
        )  # fmt: skip
    else:
        whole_end = tl.minimum(stop, Nq // Bq)
        diagonal_end = start
        if CAUSAL:
            diagonal_end = tl.minimum(tl.cdiv(n0 + Bk - 1, Bq), whole_end)
            diagonal_end = tl.maximum(diagonal_end, start)
        tail_start = tl.maximum(diagonal_end, whole_end)
        tail = tl.maximum(stop - tail_start, 0)
        dk, dv = _chunk_tiles(
            dk, dv, k, v, Q, DO, ROWS, DQ, stride_q[2], stride_do[2],
            n0, diagonal_end, whole_end, None, None, Nq, Nk, n_rows, scale,
            Bq, Bk, d, BD, CAUSAL, False, PRECISION, STAGES,
        )  # fmt: skip
        dk, dv = _chunk_tiles(
            dk, dv, k, v, Q, DO, ROWS, DQ, stride_q[2], stride_do[2],
            n0, start, diagonal_end + tail, diagonal_end, tail_start - diagonal_end,
            Nq, Nk, n_rows, scale,
            Bq, Bk, d, BD, CAUSAL, True, PRECISION, 1,
        )  # fmt: skip
    if EARLY:  # not before: programs that only wait would be in the way
        gdc_launch_dependents()
    _add_rows(DK + kv_row, dk, n0, Nk, Bk, d, BD)
    _add_rows(DV + kv_row, dv, n0, Nk, Bk, d, BD)


@triton.jit
def _weights(k, q, scale, lse, m0, offs_n, Nk, Bq: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the weights of a tile, transposed; scale has the units."""
    pt = tl.math.exp2((terms.dot(k, q, True) * scale - lse[None, :]) * LOG2E)
    return _without_hidden(pt, m0, offs_n, Nk, Bq, CAUSAL)


@triton.jit(do_not_specialize=[*SIZES, "chunk"])
def backward_wide_kernel(
    Q, K, V, DO, ROWS, DQ, DK, DV, stride_q, stride_k, stride_v, stride_do,
    scale, H, n_heads_total, GROUP, Nq, Nk, chunk,
    d: tl.constexpr, BD: tl.constexpr, Bq: tl.constexpr, Bk: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Do as ``backward_chunks_kernel`` does, with two programs per (key tile, chunk of
    queries, query head), one for dK and dQ and one for dV, and Q, K, V and DO as
    ``terms.split_rows`` leaves them."""
    scale = float32(scale)
    item = tl.program_id(0) // n_heads_total
    bh = tl.program_id(0) % n_heads_total
    tile, start, stop = _tile_and_queries(item // 2, Nq, Nk, chunk, Bq, Bk, CAUSAL)
    n_rows = tl.cdiv(Nq, ROWS_TO) * ROWS_TO
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    n0 = tile * Bk
    Q += b * stride_q[0] + h * stride_q[1]
    K += b * stride_k[0] + (h // GROUP) * stride_k[1]
    V += b * stride_v[0] + (h // GROUP) * stride_v[1]
    DO += b * stride_do[0] + h * stride_do[1]
    ROWS += (b * H + h) * 2 * n_rows
    DQ += (b * H + h) * Nq * d
    kv_row = (b * (H // GROUP) + h // GROUP) * Nk * d
    offs_n = _key_numbers(n0, Nk, Bk)
    k, k_unit = terms.load(K, n0, Nk, Bk, d, BD)
    sums = tl.zeros([Bk, BD], tl.float32)
    if item % 2 == 0:
        v, v_unit = terms.load(V, n0, Nk, Bk, d, BD)
        for at in tl.range(start, stop, num_stages=STAGES):
            m0 = at * Bq
            q, q_unit = terms.load(Q, m0, Nq, Bq, d, BD)
            do, do_unit = terms.load(DO, m0, Nq, Bq, d, BD)
            lse = tl.load(ROWS + m0 + tl.arange(0, Bq))
            delta = tl.load(ROWS + n_rows + m0 + tl.arange(0, Bq))
            pt = _weights(k, q, k_unit * q_unit * scale, lse, m0, offs_n, Nk, Bq, CAUSAL)
            dpt = terms.dot(v, do, True) * (v_unit * do_unit)
            dst, unit = terms.operand(pt * (dpt - delta[None, :]))
            sums += terms.dot(dst, q) * (unit * q_unit)
            # Transposed: a tile has fewer queries than the tensor cores' 64 rows.
            dq = terms.dot((tl.trans(k[0]), tl.trans(k[1])), dst) * (unit * k_unit)
            _add_rows(DQ, tl.trans(dq), m0, Nq, Bq, d, BD)
        _add_rows(DK + kv_row, sums, n0, Nk, Bk, d, BD)
    else:
        for at in tl.range(start, stop, num_stages=STAGES):
            m0 = at * Bq
            q, q_unit = terms.load(Q, m0, Nq, Bq, d, BD)
            do, do_unit = terms.load(DO, m0, Nq, Bq, d, BD)
            lse = tl.load(ROWS + m0 + tl.arange(0, Bq))
            pt = _weights(k, q, k_unit * q_unit * scale, lse, m0, offs_n, Nk, Bq, CAUSAL)
            sums += terms.weigh(pt, do, do_unit)
        _add_rows(DV + kv_row, sums, n0, Nk, Bk, d, BD)

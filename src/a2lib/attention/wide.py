"""The fp32 backward of heads of 65 to 128, in plain Triton: one sweep, cut into chunks of queries.

As ``chunks.py`` has it, but of two fp16 terms (``terms.py``): six products leave no tile that fits.
dV is apart from dK and dQ, or their sums would not fit the registers. The legend is that of
``kernels.py``.
"""

import triton
import triton.language as tl

from a2lib.attention.chunks import ROWS_TO, _add_rows, _tile_and_queries
from a2lib.attention.kernels import LOG2E, SIZES
from a2lib.attention.operands import float32
from a2lib.attention.terms import dot, load, operand, weigh


@triton.jit
def _weights(k, q, scale, lse, m0, offs_n, Nk, Bq: tl.constexpr, CAUSAL: tl.constexpr):
    """The weights of a tile, transposed; scale has the units."""
    pt = tl.math.exp2((dot(k, q, True) * scale - lse[None, :]) * LOG2E)
    if CAUSAL:
        # Constants on one side: registers are short.
        pt = tl.where((offs_n - m0)[:, None] <= tl.arange(0, Bq)[None, :], pt, 0.0)
    else:
        pt = tl.where((offs_n < Nk)[:, None], pt, 0.0)
    return pt


@triton.jit(do_not_specialize=[*SIZES, "chunk"])
def backward_wide_kernel(
    Q, K, V, DO, ROWS, DQ, DK, DV,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_don,
    scale, H, n_heads_total, GROUP, Nq, Nk, chunk,
    d: tl.constexpr, BD: tl.constexpr, Bq: tl.constexpr, Bk: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Do as ``chunks.backward_chunks_kernel`` does, with two programs per (key tile, chunk of
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
    Q += b * stride_qb + h * stride_qh
    K += b * stride_kb + (h // GROUP) * stride_kh
    V += b * stride_vb + (h // GROUP) * stride_vh
    DO += b * stride_dob + h * stride_doh
    ROWS += (b * H + h) * 2 * n_rows
    DQ += (b * H + h) * Nq * d
    kv_row = (b * (H // GROUP) + h // GROUP) * Nk * d
    offs_n = n0 + tl.arange(0, Bk)
    # A key past Nk is later than every query. Its weight may be infinite, and dQ would have it.
    offs_n = tl.where(offs_n < Nk, offs_n, 2**31 - 1)
    k, k_unit = load(K, n0, Nk, Bk, d, BD)
    sums = tl.zeros([Bk, BD], tl.float32)
    if item % 2 == 0:
        v, v_unit = load(V, n0, Nk, Bk, d, BD)
        for at in tl.range(start, stop, num_stages=STAGES):
            m0 = at * Bq
            q, q_unit = load(Q, m0, Nq, Bq, d, BD)
            do, do_unit = load(DO, m0, Nq, Bq, d, BD)
            lse = tl.load(ROWS + m0 + tl.arange(0, Bq))
            delta = tl.load(ROWS + n_rows + m0 + tl.arange(0, Bq))
            pt = _weights(k, q, k_unit * q_unit * scale, lse, m0, offs_n, Nk, Bq, CAUSAL)
            dpt = dot(v, do, True) * (v_unit * do_unit)
            dst, unit = operand(pt * (dpt - delta[None, :]))
            sums += dot(dst, q) * (unit * q_unit)
            # Transposed: a tile has fewer queries than the tensor cores' 64 rows.
            dq = dot((tl.trans(k[0]), tl.trans(k[1])), dst) * (unit * k_unit)
            _add_rows(DQ, tl.trans(dq), m0, Nq, Bq, d, BD)
        _add_rows(DK + kv_row, sums, n0, Nk, Bk, d, BD)
    else:
        for at in tl.range(start, stop, num_stages=STAGES):
            m0 = at * Bq
            q, q_unit = load(Q, m0, Nq, Bq, d, BD)
            do, do_unit = load(DO, m0, Nq, Bq, d, BD)
            lse = tl.load(ROWS + m0 + tl.arange(0, Bq))
            pt = _weights(k, q, k_unit * q_unit * scale, lse, m0, offs_n, Nk, Bq, CAUSAL)
            sums += weigh(pt, do, do_unit)
        _add_rows(DV + kv_row, sums, n0, Nk, Bk, d, BD)

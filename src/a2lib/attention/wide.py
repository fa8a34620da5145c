"""The fp32 backward of heads of 65 to 128, in plain Triton: one sweep, cut into chunks of queries.

As ``chunks.py`` has it, but of two fp16 terms (``terms.py``): six products leave no tile that fits.
dV is apart from dK and dQ, or their sums would not fit the registers. The legend is that of
``kernels.py``.
"""

import triton
import triton.language as tl

from a2lib.attention.chunks import ROWS_TO, _tile_and_queries
from a2lib.attention.kernels import LOG2E, SIZES, float32
from a2lib.attention.operands import int64
from a2lib.attention.terms import (
    PIECE,
    SPLIT_ROWS,
    WEIGHTS,
    dot,
    exponent_of,
    load,
    power_of_2,
    split,
)


@triton.jit
def _turned(x, i: tl.constexpr):
    """The transpose of piece i of an operand."""
    return (tl.trans(x[0][i]),), (tl.trans(x[1][i]),)


@triton.jit
def _add_piece(
    ptr, x, i: tl.constexpr, row0, n_rows, B: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr
):
    """Add x to piece i of rows ``row0 .. row0 + B`` of a contiguous (n_rows, d) matrix."""
    offs_r = tl.arange(0, B)
    offs_d = i * WIDTH + tl.arange(0, WIDTH)
    ptrs = ptr + int64(row0) * d + offs_r[:, None] * d + offs_d[None, :]
    mask = (row0 + offs_r < n_rows)[:, None]
    if d < (i + 1) * WIDTH:
        mask = mask & (offs_d < d)[None, :]
    tl.atomic_add(ptrs, x, mask=mask, sem="relaxed")


@triton.jit
def _weights(k, q, unit, lse, m0, offs_n, Nk, Bq: tl.constexpr, CAUSAL: tl.constexpr):
    """The weights of a tile, transposed; unit has the scale of scores."""
    st = dot(k, q, unit, True)
    pt = tl.math.exp2((st - lse[None, :]) * LOG2E)
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
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, SIDES: tl.constexpr,
):  # fmt: skip
    """As ``chunks.backward_chunks_kernel``, but of dK and dQ (SIDES "dk"), of dV ("dv"), or with
    two programs per (key tile, chunk of queries, query head), one for either ("both"), and Q, K, V
    and DO as ``split_wide_kernel`` leaves them."""
    scale = float32(scale)
    item = tl.program_id(0) // n_heads_total
    bh = tl.program_id(0) % n_heads_total
    of_v: tl.constexpr = SIDES == "dv"
    if SIDES == "both":
        of_v = item % 2 == 1
        item = item // 2
    tile, start, stop = _tile_and_queries(item, Nq, Nk, chunk, Bq, Bk, CAUSAL)
    n_rows = tl.cdiv(Nq, ROWS_TO) * ROWS_TO
    n_keys = tl.cdiv(Nk, SPLIT_ROWS) * SPLIT_ROWS
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
    k, k_unit = load(K, n0, n_keys, Bk, d, BD, PIECE)
    if not of_v:
        v, v_unit = load(V, n0, n_keys, Bk, d, BD, PIECE)
        dk = ()
        for _ in tl.static_range(BD // PIECE):
            dk = dk + (tl.zeros([Bk, PIECE], tl.float32),)
        for at in tl.range(start, stop, num_stages=STAGES):
            m0 = at * Bq
            q, q_unit = load(Q, m0, n_rows, Bq, d, BD, PIECE)
            do, do_unit = load(DO, m0, n_rows, Bq, d, BD, PIECE)
            lse = tl.load(ROWS + m0 + tl.arange(0, Bq))
            delta = tl.load(ROWS + n_rows + m0 + tl.arange(0, Bq))
            pt = _weights(k, q, k_unit * q_unit * scale, lse, m0, offs_n, Nk, Bq, CAUSAL)
            dpt = dot(v, do, v_unit * do_unit, True)
            dst = pt * (dpt - delta[None, :])
            e = exponent_of(dst)
            dst = split(dst * power_of_2(-e))
            unit = power_of_2(e)
            sums = ()
            for i in tl.static_range(BD // PIECE):
                piece = (q[0][i],), (q[1][i],)
                sums = sums + (dot(dst, piece, unit * q_unit, False, dk[i]),)
            dk = sums
            for i in tl.static_range(BD // PIECE):
                if Bq < 64:  # fewer rows than the tensor cores' 64
                    dq = tl.trans(dot(_turned(k, i), dst, unit * k_unit))
                else:
                    piece = (k[0][i],), (k[1][i],)
                    dq = dot(_turned(dst, 0), piece, unit * k_unit)
                _add_piece(DQ, dq, i, m0, Nq, Bq, d, PIECE)
        for i in tl.static_range(BD // PIECE):
            _add_piece(DK + kv_row, dk[i], i, n0, Nk, Bk, d, PIECE)
    else:
        dv = tl.zeros([Bk, BD], tl.float32)
        for at in tl.range(start, stop, num_stages=STAGES):
            m0 = at * Bq
            q, q_unit = load(Q, m0, n_rows, Bq, d, BD, PIECE)
            do, do_unit = load(DO, m0, n_rows, Bq, d, BD, BD)
            lse = tl.load(ROWS + m0 + tl.arange(0, Bq))
            pt = _weights(k, q, k_unit * q_unit * scale, lse, m0, offs_n, Nk, Bq, CAUSAL)
            dv = dot(split(pt * WEIGHTS), do, do_unit / WEIGHTS, False, dv)
        _add_piece(DV + kv_row, dv, 0, n0, Nk, Bk, d, BD)

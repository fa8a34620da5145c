"""The fp32 backward of heads of 65 to 128, in plain Triton: one sweep, cut into chunks of queries.

As ``chunks.py`` has it, but of two fp16 terms for three of bf16, so that a product is three on the
tensor cores for six (Ootomo and Yokota, 2022): six leave no tile that fits. The second term is
2**11 times as large as it counts. fp16 has few exponents: terms are those of rows divided by a
power of two, the ``unit`` of their block, with which its largest finite element is near fp16's
largest. An element keeps fp32's digits down to 2**-28 of that, and has some down to 2**-52.

The tensor cores cut off what they add up, after each 16 columns: over 128 columns that is more than
fp32's own error. Columns are multiplied in pieces, whose sums are added in fp32. dV is apart from
dK and dQ, each by programs of its own, or their sums would not fit the registers. The legend is
that of ``kernels.py``.
"""

import triton
import triton.language as tl

from a2lib.attention.chunks import ROWS_TO, _tile_and_queries
from a2lib.attention.kernels import LOG2E, SIZES, float32
from a2lib.attention.operands import INTERPRETED, int64, load_rows

SPLIT_ROWS = tl.constexpr(128)  # a multiple of every tile's sides
PIECE = tl.constexpr(64)  # columns
# Weights up to 1, and those that rounding makes larger, and the unit they are split in.
WEIGHTS = tl.constexpr(2.0**12)


@triton.jit
def _one_dot(a, b, TURNED: tl.constexpr, acc):
    if TURNED:
        b = tl.trans(b)
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        product = tl.dot(a, b, acc)
    return product


@triton.jit
def _dot(a, b, unit, TURNED: tl.constexpr = False, acc=None):
    """``unit * a @ b``, or of ``b.T`` if TURNED, plus ``acc`` if given, in fp32. a and b are the
    pieces of both terms, which are multiplied piece by piece."""
    # The smallest first. Where an operand is infinite its second term gives NaN.
    low = None
    for i in tl.static_range(len(a[0])):
        low = _one_dot(a[0][i], b[1][i], TURNED, low)
        low = _one_dot(a[1][i], b[0][i], TURNED, low)
    product = tl.where(low == low, low * 2**-11, 0.0)
    product = _one_dot(a[0][0], b[0][0], TURNED, product)
    for i in tl.static_range(1, len(a[0])):
        product += _one_dot(a[0][i], b[0][i], TURNED, None)
    product *= unit
    # Apart from the sum so far, to which the tensor cores would add with less than fp32.
    if acc is not None:
        product += acc
    return product


@triton.jit
def _split(x):
    """The terms of x, of one piece."""
    high = x.to(tl.float16)
    return (high,), (((x - high.to(tl.float32)) * 2**11).to(tl.float16),)


@triton.jit
def _exponent_of(x):
    """The e for which the largest finite element of x / 2**e is from 2**14 on to 2**15. Limited,
    so that a unit, its inverse and the product of two are normal numbers, unless too large."""
    size = tl.abs(x)
    size = tl.where(size < float("inf"), size, 0.0)
    top = tl.max(tl.max(size, 1), 0)
    return tl.maximum((top.to(tl.int32, bitcast=True) >> 23) - 127 - 14, -63)


@triton.jit
def _power_of_2(e):
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_term(ptr, row0, B: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, WIDTH: tl.constexpr):
    pieces = ()
    for i in tl.static_range(BD // WIDTH):
        offs_d = i * WIDTH + tl.arange(0, WIDTH)
        ptrs = ptr + int64(row0) * 2 * d + tl.arange(0, B)[:, None] * 2 * d + offs_d[None, :]
        if d < (i + 1) * WIDTH:
            x = tl.load(ptrs, mask=(offs_d < d)[None, :], other=0.0)
        else:
            x = tl.load(ptrs)
        pieces = pieces + (x,)
    return pieces


@triton.jit
def _load(
    ptr, row0, n_rows, B: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, WIDTH: tl.constexpr
):
    """Both terms of rows ``row0 .. row0 + B``, in pieces of WIDTH columns, and their unit. ptr has
    n_rows, a multiple of SPLIT_ROWS, as ``split_wide_kernel`` leaves them."""
    high = _load_term(ptr, row0, B, d, BD, WIDTH)
    low = _load_term(ptr + d, row0, B, d, BD, WIDTH)
    e = tl.load(ptr + int64(n_rows) * 2 * d + row0 // SPLIT_ROWS)
    return (high, low), _power_of_2(e.to(tl.int32))


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
def _weights(
    k, q, unit, lse, m0, offs_n, Nk, Bq: tl.constexpr, CAUSAL: tl.constexpr
):
    """The weights of a tile, transposed; unit has the scale of scores."""
    st = _dot(k, q, unit, True)
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
    k, k_unit = _load(K, n0, n_keys, Bk, d, BD, PIECE)
    if not of_v:
        v, v_unit = _load(V, n0, n_keys, Bk, d, BD, PIECE)
        dk = ()
        for _ in tl.static_range(BD // PIECE):
            dk = dk + (tl.zeros([Bk, PIECE], tl.float32),)
        for at in tl.range(start, stop, num_stages=STAGES):
            m0 = at * Bq
            q, q_unit = _load(Q, m0, n_rows, Bq, d, BD, PIECE)
            do, do_unit = _load(DO, m0, n_rows, Bq, d, BD, PIECE)
            lse = tl.load(ROWS + m0 + tl.arange(0, Bq))
            delta = tl.load(ROWS + n_rows + m0 + tl.arange(0, Bq))
            pt = _weights(k, q, k_unit * q_unit * scale, lse, m0, offs_n, Nk, Bq, CAUSAL)
            dpt = _dot(v, do, v_unit * do_unit, True)
            dst = pt * (dpt - delta[None, :])
            e = _exponent_of(dst)
            dst = _split(dst * _power_of_2(-e))
            unit = _power_of_2(e)
            sums = ()
            for i in tl.static_range(BD // PIECE):
                piece = (q[0][i],), (q[1][i],)
                sums = sums + (_dot(dst, piece, unit * q_unit, False, dk[i]),)
            dk = sums
            for i in tl.static_range(BD // PIECE):
                if Bq < 64:  # fewer rows than the tensor cores' 64
                    dq = tl.trans(_dot(_turned(k, i), dst, unit * k_unit))
                else:
                    piece = (k[0][i],), (k[1][i],)
                    dq = _dot(_turned(dst, 0), piece, unit * k_unit)
                _add_piece(DQ, dq, i, m0, Nq, Bq, d, PIECE)
        for i in tl.static_range(BD // PIECE):
            _add_piece(DK + kv_row, dk[i], i, n0, Nk, Bk, d, PIECE)
    else:
        dv = tl.zeros([Bk, BD], tl.float32)
        for at in tl.range(start, stop, num_stages=STAGES):
            m0 = at * Bq
            q, q_unit = _load(Q, m0, n_rows, Bq, d, BD, PIECE)
            do, do_unit = _load(DO, m0, n_rows, Bq, d, BD, BD)
            lse = tl.load(ROWS + m0 + tl.arange(0, Bq))
            pt = _weights(k, q, k_unit * q_unit * scale, lse, m0, offs_n, Nk, Bq, CAUSAL)
            dv = _dot(_split(pt * WEIGHTS), do, do_unit / WEIGHTS, False, dv)
        _add_piece(DV + kv_row, dv, 0, n0, Nk, Bk, d, BD)


@triton.jit
def _split_rows(
    X, Y, stride_xb, stride_xh, stride_xn, stride_yh, tile, H, N,
    d: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(N, SPLIT_ROWS)
    bh = (tile // n_tiles).to(tl.int64)
    m0 = tile % n_tiles * SPLIT_ROWS
    X += (bh // H) * stride_xb + (bh % H) * stride_xh
    Y += bh * stride_yh
    x = load_rows(X, m0, N, stride_xn, SPLIT_ROWS, d, BD, True)
    e = _exponent_of(x)
    tl.store(Y + int64(n_tiles) * SPLIT_ROWS * 2 * d + tile % n_tiles, e.to(tl.float16))
    high, low = _split(x * _power_of_2(-e))
    offs_d = tl.arange(0, BD)
    Y += int64(m0) * 2 * d
    ptrs = Y + tl.arange(0, SPLIT_ROWS)[:, None] * 2 * d + offs_d[None, :]
    tl.store(ptrs, high[0], mask=(offs_d < d)[None, :])
    tl.store(ptrs + d, low[0], mask=(offs_d < d)[None, :])


@triton.jit(do_not_specialize=["H", "N"])
def split_wide_kernel(
    X, Z, X_TERMS, Z_TERMS,
    stride_xb, stride_xh, stride_xn, stride_zb, stride_zh, stride_zn, stride_terms, H, N,
    d: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """X_TERMS and Z_TERMS: (B, H, rows, 2 d) contiguous fp16, the two terms of each row of X and
    of Z, both (B, H, N, d) fp32; of zeros up to a multiple of SPLIT_ROWS; behind a head's rows the
    exponents of the units of its blocks of SPLIT_ROWS. Two at once, each by half of the programs:
    to launch takes longer than to split a short sequence."""
    tile, half = tl.program_id(0), tl.num_programs(0) // 2
    if tile < half:
        _split_rows(X, X_TERMS, stride_xb, stride_xh, stride_xn, stride_terms, tile, H, N, d, BD)
    else:
        _split_rows(
            Z, Z_TERMS, stride_zb, stride_zh, stride_zn, stride_terms, tile - half, H, N, d, BD
        )

"""fp32 as two terms of fp16, of which three products on tensor cores are about as exact as fp32's
(Ootomo and Yokota, 2022), where three terms of bf16 take six.

The second term is 2**11 times as large as it counts. fp16 has few exponents: terms are those of
rows divided by a power of two, the ``unit`` of their block, with which its largest finite element
is near fp16's largest. An element keeps fp32's digits down to 2**-28 of that, and has some down to
2**-52. q, k, v and do are split once, by ``split_wide_kernel``.

The tensor cores cut off what they add up, after each 16 columns: over 128 columns that is more than
fp32's own error. Columns are multiplied in pieces, whose sums are added in fp32. An operand is the
pieces of the first term and those of the second.
"""

import triton
import triton.language as tl

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
def dot(a, b, unit, TURNED: tl.constexpr = False, acc=None):
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
def split(x):
    """The terms of x, of one piece."""
    high = x.to(tl.float16)
    return (high,), (((x - high.to(tl.float32)) * 2**11).to(tl.float16),)


@triton.jit
def exponent_of(x):
    """The e for which the largest finite element of x / 2**e is from 2**14 on to 2**15. Limited,
    so that a unit, its inverse and the product of two are normal numbers, unless too large."""
    size = tl.abs(x)
    size = tl.where(size < float("inf"), size, 0.0)
    top = tl.max(tl.max(size, 1), 0)
    return tl.maximum((top.to(tl.int32, bitcast=True) >> 23) - 127 - 14, -63)


@triton.jit
def power_of_2(e):
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
def load(
    ptr, row0, n_rows, B: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, WIDTH: tl.constexpr
):
    """Both terms of rows ``row0 .. row0 + B``, in pieces of WIDTH columns, and their unit. ptr has
    n_rows, a multiple of SPLIT_ROWS, as ``split_wide_kernel`` leaves them."""
    high = _load_term(ptr, row0, B, d, BD, WIDTH)
    low = _load_term(ptr + d, row0, B, d, BD, WIDTH)
    e = tl.load(ptr + int64(n_rows) * 2 * d + row0 // SPLIT_ROWS)
    return (high, low), power_of_2(e.to(tl.int32))


@triton.jit
def load_and_split(
    ptr, row0, n_rows, stride,
    B: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``load`` of rows of an (n_rows, d) matrix in fp32."""
    rows = (row0 + tl.arange(0, B) < n_rows)[:, None]
    e = -63
    pieces = ()
    for i in tl.static_range(BD // WIDTH):
        offs_d = i * WIDTH + tl.arange(0, WIDTH)
        ptrs = ptr + int64(row0) * stride + tl.arange(0, B)[:, None] * stride + offs_d[None, :]
        x = tl.load(ptrs, mask=rows & (offs_d < d)[None, :], other=0.0)
        e = tl.maximum(e, exponent_of(x))
        pieces = pieces + (x,)
    high = ()
    low = ()
    for i in tl.static_range(BD // WIDTH):
        x = split(pieces[i] * power_of_2(-e))
        high = high + x[0]
        low = low + x[1]
    return (high, low), power_of_2(e)


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
    e = exponent_of(x)
    tl.store(Y + int64(n_tiles) * SPLIT_ROWS * 2 * d + tile % n_tiles, e.to(tl.float16))
    high, low = split(x * power_of_2(-e))
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

"""fp32 as two terms of fp16, of which three products on tensor cores are about as exact as fp32's
(Ootomo and Yokota, 2022), where three terms of bf16 take six.

The second term is 2**11 times as large as it counts. fp16 has few exponents: terms are those of
rows divided by a power of two, the ``unit`` of their block, with which its largest finite element
is near fp16's largest. An element keeps fp32's digits down to 2**-28 of that, and has some down to
2**-52. q, k, v and do are split once, by ``kernels.split_kernel``.
"""

import triton
import triton.language as tl

from a2lib.attention.operands import int64, load_rows, one_dot, store_rows

SPLIT_ROWS = tl.constexpr(128)  # a multiple of every tile's sides
# Weights up to 1, and those that rounding makes larger, and the unit they are split in.
WEIGHTS = tl.constexpr(2.0**12)


@triton.jit
def dot(a, b, TURNED: tl.constexpr = False):
    """``a @ b``, or ``a @ b.T`` if TURNED, in fp32 and in the product of their units; a and b are
    both terms each."""
    # The smallest first. Where an operand is infinite its second term gives NaN.
    low = one_dot(a[0], b[1], TURNED, None)
    low = one_dot(a[1], b[0], TURNED, low)
    # Not onto a sum so far, to which the tensor cores would add with less than fp32.
    return one_dot(a[0], b[0], TURNED, tl.where(low == low, low * 2**-11, 0.0))


@triton.jit
def split(x):
    """Return the terms of x."""
    high = x.to(tl.float16)
    return high, ((x - high.to(tl.float32)) * 2**11).to(tl.float16)


@triton.jit
def weigh(p, x, unit):
    """``unit * p @ x`` of weights p, in fp32, and both terms of x."""
    return dot(split(p * WEIGHTS), x) * (unit / WEIGHTS)


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
def operand(x):
    """Return the terms of x, and their unit."""
    e = _exponent_of(x)
    return split(x * _power_of_2(-e)), _power_of_2(e)


@triton.jit
def load(ptr, row0, n_rows, B: tl.constexpr, d: tl.constexpr, BD: tl.constexpr):
    """``operand`` of rows ``row0 .. row0 + B`` of n_rows; at ptr, they lie as ``split_rows`` leaves
    them."""
    W: tl.constexpr = (d + 7) // 8 * 8
    padded = tl.cdiv(n_rows, SPLIT_ROWS) * SPLIT_ROWS
    high = load_rows(ptr, row0, padded, 2 * W, B, W, BD, False)
    low = load_rows(ptr + W, row0, padded, 2 * W, B, W, BD, False)
    e = tl.load(ptr + int64(padded) * 2 * W + row0 // SPLIT_ROWS)
    return (high, low), _power_of_2(e.to(tl.int32))


@triton.jit
def split_rows(
    X, Y, stride_x, tile, H, N,
    d: tl.constexpr, BD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Y: (B, H, rows, 2 W), the two terms of each row. Each has zeros up to W, a multiple of 8, and
    a head up to a multiple of B rows, which is SPLIT_ROWS; behind those are the exponents of the
    units of its blocks of B (``forms.fp16_terms_shape``)."""
    W: tl.constexpr = (d + 7) // 8 * 8
    n_tiles = tl.cdiv(N, B)
    bh = (tile // n_tiles).to(tl.int64)
    block = tile % n_tiles
    X += (bh // H) * stride_x[0] + (bh % H) * stride_x[1]
    Y += bh * (n_tiles * B + tl.cdiv(n_tiles, 2 * W)) * 2 * W
    x = load_rows(X, block * B, N, stride_x[2], B, d, BD, True)
    e = _exponent_of(x)
    high, low = split(x * _power_of_2(-e))
    padded = n_tiles * B
    store_rows(Y, high, block * B, padded, 2 * W, B, W, BD)
    store_rows(Y + W, low, block * B, padded, 2 * W, B, W, BD)
    tl.store(Y + int64(padded) * 2 * W + block, e.to(tl.float16))

"""What the kernels of plain Triton multiply: operands, and how rows become such.

An operand is a tuple of tiles whose sum it is. One tile, but for fp32 as ``PRECISION`` fp16x3 has
it: two terms of fp16, the second 2**11 times as large as it counts, of which three products are
about as exact as fp32's (Ootomo and Yokota, 2022). fp16 has few exponents, so that terms are those
of rows divided by a power of two, the block's ``unit``, with which the largest finite element
is near fp16's largest: an element keeps fp32's digits down to 2**-28 of it, and has some to 2**-52.
q, k, v and do are split once, by ``split_kernel``: split in each kernel's loop, they took longer
than products.
"""

import triton
import triton.language as tl

# Triton's interpreter multiplies the bit patterns of bfloat16 operands.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
SPLIT_ROWS = tl.constexpr(128)  # a multiple of every tile's sides


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, TURNED: tl.constexpr = False, acc=None, unit=1.0):
    """``unit * a @ b``, or of ``b.T`` if TURNED, plus ``acc`` if given, in fp32; operands as
    ``operand`` makes them and ``load`` reads them. Other than in fp16x3 unit is 1."""
    if PRECISION == "fp16x3":
        # The smallest first. Where an operand is infinite its second term gives NaN.
        product = _one_dot(a[0], b[1], TURNED, PRECISION, None)
        product = _one_dot(a[1], b[0], TURNED, PRECISION, product)
        product = tl.where(product == product, product * 2**-11, 0.0)
        product = _one_dot(a[0], b[0], TURNED, PRECISION, product) * unit
        # Apart from the sum so far, to which the tensor cores would add with less than fp32.
        if acc is not None:
            product += acc
    else:
        product = _one_dot(a[0], b[0], TURNED, PRECISION, acc)
    return product


@triton.jit
def _one_dot(a, b, TURNED: tl.constexpr, PRECISION: tl.constexpr, acc):
    if TURNED:
        b = tl.trans(b)
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif PRECISION == "tf32":
        product = tl.dot(a, b, acc, input_precision="tf32")
    else:
        product = tl.dot(a, b, acc)
    return product


@triton.jit
def operand(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """``x`` as a product takes it: rounded to ``dtype``, or in fp16x3 as two terms."""
    if PRECISION == "fp16x3":
        high = x.to(tl.float16)
        return high, ((x - high.to(tl.float32)) * 2**11).to(tl.float16)
    else:
        return (x.to(dtype),)


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
def scaled(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """The operand of x / unit, and unit."""
    if PRECISION == "fp16x3":
        e = exponent_of(x)
        return operand(x * power_of_2(-e), dtype, PRECISION), power_of_2(e)
    else:
        return operand(x, dtype, PRECISION), 1.0


# Weights up to 1, and those that rounding makes larger, and the unit they are split in.
WEIGHTS = tl.constexpr(2.0**12)


@triton.jit
def weights(p, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """``scaled`` of weights."""
    if PRECISION == "fp16x3":
        return operand(p * WEIGHTS, dtype, PRECISION), 1.0 / WEIGHTS
    else:
        return operand(p, dtype, PRECISION), 1.0


@triton.jit
def in_float32(x, PRECISION: tl.constexpr):
    """The inverse of ``operand``, in fp32."""
    if PRECISION == "fp16x3":
        return x[1].to(tl.float32) * 2**-11 + x[0].to(tl.float32)
    else:
        return x[0].to(tl.float32)


@triton.jit
def int64(x):
    # A loop counter is a plain int in the interpreter, and a tensor in a compiled kernel.
    return tl.zeros([], tl.int64) + x


@triton.jit
def load_rows(
    ptr, row0, n_rows, stride,
    B: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Rows ``row0 .. row0 + B`` of a (n_rows, d) matrix as (B, BD); zero outside of it."""
    offs_r = tl.arange(0, B)
    offs_d = tl.arange(0, BD)
    # The tile's origin in 64 bits, offsets within a tile in 32: long sequences do not overflow.
    ptrs = ptr + int64(row0) * stride + offs_r[:, None] * stride + offs_d[None, :]
    if MASK and d != BD:
        x = tl.load(ptrs, mask=(row0 + offs_r < n_rows)[:, None] & (offs_d < d)[None, :], other=0.0)
    elif MASK:
        x = tl.load(ptrs, mask=(row0 + offs_r < n_rows)[:, None], other=0.0)
    elif d != BD:
        x = tl.load(ptrs, mask=(offs_d < d)[None, :], other=0.0)
    else:
        x = tl.load(ptrs)
    return x


@triton.jit
def load(
    ptr, row0, n_rows, stride, B: tl.constexpr, d: tl.constexpr, BD: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows as a product's operand; a row has its terms one behind the other."""
    high = load_rows(ptr, row0, n_rows, stride, B, d, BD, MASK)
    if PRECISION == "fp16x3":
        return high, load_rows(ptr + d, row0, n_rows, stride, B, d, BD, MASK)
    else:
        return (high,)


@triton.jit
def load_unit(ptr, row0, n_rows, stride, PRECISION: tl.constexpr):
    """The unit of rows that lie within one block of ``split_kernel``."""
    if PRECISION == "fp16x3":
        e = tl.load(ptr + int64(n_rows) * stride + row0 // SPLIT_ROWS)
        return power_of_2(e.to(tl.int32))
    else:
        return 1.0


@triton.jit
def store_rows(ptr, x, row0, n_rows, stride, B: tl.constexpr, d: tl.constexpr, BD: tl.constexpr):
    """The inverse of ``load_rows``; elements outside of the matrix are dropped."""
    offs_r = tl.arange(0, B)
    offs_d = tl.arange(0, BD)
    ptrs = ptr + int64(row0) * stride + offs_r[:, None] * stride + offs_d[None, :]
    mask = (row0 + offs_r < n_rows)[:, None]
    if d != BD:
        mask = mask & (offs_d < d)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=mask)


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
    tl.store(Y + int64(N) * 2 * d + tile % n_tiles, e.to(tl.float16))
    x = operand(x * power_of_2(-e), tl.float16, "fp16x3")
    store_rows(Y, x[0], m0, N, 2 * d, SPLIT_ROWS, d, BD)
    store_rows(Y + d, x[1], m0, N, 2 * d, SPLIT_ROWS, d, BD)


@triton.jit(do_not_specialize=["H", "N"])
def split_kernel(
    X, Z, X_TERMS, Z_TERMS,
    stride_xb, stride_xh, stride_xn, stride_zb, stride_zh, stride_zn, stride_terms, H, N,
    d: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """X_TERMS and Z_TERMS: (B, H, N + some, 2 d) contiguous fp16, the two terms of each row of X
    and of Z, both (B, H, N, d) fp32; behind a head's rows the exponents of the units of its blocks
    of SPLIT_ROWS. Two at once, each by half of the programs: to launch takes longer than to split a
    short sequence."""
    tile, half = tl.program_id(0), tl.num_programs(0) // 2
    if tile < half:
        _split_rows(X, X_TERMS, stride_xb, stride_xh, stride_xn, stride_terms, tile, H, N, d, BD)
    else:
        _split_rows(
            Z, Z_TERMS, stride_zb, stride_zh, stride_zn, stride_terms, tile - half, H, N, d, BD
        )

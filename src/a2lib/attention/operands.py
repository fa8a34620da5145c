"""Make and multiply the operands of the kernels of plain Triton.

An operand is a tuple of tiles whose sum it is. One tile, but for fp32 as ``PRECISION`` bf16x6 has
it: three terms of bf16, high, middle and low, of which six products are as exact as fp32's. They
are split once, by ``kernels.split_kernel``: split in each kernel's loop, they took longer than
products.
"""

import triton
import triton.language as tl

# Triton's interpreter multiplies the bit patterns of bfloat16 operands.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def float32(x):
    # Traced by torch.compile, a Python float is fp64, or a constant without methods (torch 2.11);
    # the interpreter passes it as it is.
    if INTERPRETED:
        return x
    else:
        return tl.cast(x, tl.float32)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, TURNED: tl.constexpr = False, acc=None):
    """``a @ b``, or ``a @ b.T`` if TURNED, plus ``acc`` if given, in fp32; operands as ``operand``
    makes them and ``load`` reads them."""
    if PRECISION == "bf16x6":
        # The smallest first. Where an operand is infinite its terms give NaN but in the last.
        product = one_dot(a[1], b[1], TURNED, None)
        product = one_dot(a[2], b[0], TURNED, product)
        product = one_dot(a[0], b[2], TURNED, product)
        product = one_dot(a[1], b[0], TURNED, product)
        product = one_dot(a[0], b[1], TURNED, product)
        product = tl.where(product == product, product, 0.0)
        product = one_dot(a[0], b[0], TURNED, product)
        # Apart from the sum so far, to which the tensor cores would add with less than fp32.
        if acc is not None:
            product += acc
    else:
        product = one_dot(a[0], b[0], TURNED, acc)
    return product


@triton.jit
def one_dot(a, b, TURNED: tl.constexpr, acc):
    if TURNED:
        b = tl.trans(b)
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        product = tl.dot(a, b, acc)
    return product


@triton.jit
def operand(x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """``x`` as a product takes it: rounded to ``dtype``, or in bf16x6 as three terms of bf16, whose
    sum it is."""
    if PRECISION == "bf16x6":
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)
    else:
        return (x.to(dtype),)


@triton.jit
def in_float32(x, PRECISION: tl.constexpr):
    """Return the inverse of ``operand``, in fp32."""
    if PRECISION == "bf16x6":
        return x[2].to(tl.float32) + x[1].to(tl.float32) + x[0].to(tl.float32)
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
    """Rows as a product's operand; in bf16x6 a row has its terms one behind the other."""
    if PRECISION == "bf16x6":
        high = load_rows(ptr, row0, n_rows, stride, B, d, BD, MASK)
        middle = load_rows(ptr + d, row0, n_rows, stride, B, d, BD, MASK)
        return high, middle, load_rows(ptr + 2 * d, row0, n_rows, stride, B, d, BD, MASK)
    else:
        return (load_rows(ptr, row0, n_rows, stride, B, d, BD, MASK),)


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
def in_order(x, B: tl.constexpr):
    """x, (B, 128), each of whose tiles of 64 by 64 ``hopper_backward._dq_add`` has permuted."""
    # Rows are: tile, eight columns, warp, row (upper bit); columns: tile, row (the rest), pair of
    # columns, upper or lower eight rows of the warp, which of the pair.
    x = x.reshape(B // 64, 8, 4, 2, 2, 4, 4, 2, 2)
    return x.permute(0, 2, 7, 3, 5, 4, 1, 6, 8).reshape(B, 128)


@triton.jit
def split_rows(
    X, Y, stride_x, tile, H, N,
    d: tl.constexpr, BD: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Y: the three terms of each row, one behind the other, as ``kernels.split_kernel`` has it."""
    n_tiles = tl.cdiv(N, B)
    bh = (tile // n_tiles).to(tl.int64)
    m0 = tile % n_tiles * B
    X += (bh // H) * stride_x[0] + (bh % H) * stride_x[1]
    x = operand(load_rows(X, m0, N, stride_x[2], B, d, BD, True), tl.bfloat16, "bf16x6")
    Y += bh * N * 3 * d
    store_rows(Y, x[0], m0, N, 3 * d, B, d, BD)
    store_rows(Y + d, x[1], m0, N, 3 * d, B, d, BD)
    store_rows(Y + 2 * d, x[2], m0, N, 3 * d, B, d, BD)

"""What the ladder puts into copies of the plain Triton kernels: masks that cost more than ours.

``kernels.py`` runs each loop over tiles twice, without a mask and with one. Here all goes through
the loop with a mask, whose loads are not pipelined, and where ``every_key`` is used also through
the tiles of which no query sees a key. Imports Triton.
"""

import functools
import types

import triton
import triton.language as tl

from a2lib.attention import kernels
from a2lib.attention.kernels import _dkdv_tiles, visible_keys
from a2lib.attention.tiles import SPECIALISED


@triton.jit
def every_key(m0, Nk, Bq: tl.constexpr, Bk: tl.constexpr, CAUSAL: tl.constexpr):
    """``visible_keys`` that says: all, and none without a mask."""
    return 0, Nk


@triton.jit
def masked_keys(m0, Nk, Bq: tl.constexpr, Bk: tl.constexpr, CAUSAL: tl.constexpr):
    """``visible_keys`` that says: none without a mask."""
    whole, stop = visible_keys(m0, Nk, Bq, Bk, CAUSAL)
    return 0, stop


@triton.jit
def masked_queries(
    dk, dv, k, v, Q, DO, LSE, DELTA, stride_qn, stride_don,
    n0, start, stop, jump, skip, Nq, scale,
    Bq: tl.constexpr, Bk: tl.constexpr, d: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, NEEDS_DK: tl.constexpr, NEEDS_DV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``_dkdv_tiles`` that masks whatever it is asked for."""
    return _dkdv_tiles(
        dk, dv, k, v, Q, DO, LSE, DELTA, stride_qn, stride_don, n0, start, stop, jump, skip, Nq,
        scale, Bq, Bk, d, BD, CAUSAL, True, NEEDS_DK, NEEDS_DV, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def every_query(
    dk, dv, k, v, Q, DO, LSE, DELTA, stride_qn, stride_don,
    n0, start, stop, jump, skip, Nq, scale,
    Bq: tl.constexpr, Bk: tl.constexpr, d: tl.constexpr, BD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, NEEDS_DK: tl.constexpr, NEEDS_DV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``masked_queries`` that begins at the first query, where it had begun at the diagonal."""
    if MASK:
        start = start * 0
    return _dkdv_tiles(
        dk, dv, k, v, Q, DO, LSE, DELTA, stride_qn, stride_don, n0, start, stop, jump, skip, Nq,
        scale, Bq, Bk, d, BD, CAUSAL, True, NEEDS_DK, NEEDS_DV, PRECISION, STAGES,
    )  # fmt: skip


@functools.cache
def kernel(name, every):
    """A copy of the kernel of plain Triton that ``tiles.SPECIALISED`` has under ``name``, with a
    mask in each tile: in ``every`` one, or in those up to the diagonal."""
    whole = getattr(kernels, SPECIALISED[name][0])
    instead = {
        "visible_keys": every_key if every else masked_keys,
        "_dkdv_tiles": every_query if every else masked_queries,
    }
    made = types.FunctionType(whole.fn.__code__, {**vars(kernels), **instead}, whole.fn.__name__)
    made.__annotations__, made.__module__ = whole.fn.__annotations__, whole.fn.__module__
    return triton.jit(do_not_specialize=kernels.SIZES)(made)

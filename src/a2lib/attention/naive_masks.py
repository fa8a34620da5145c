"""Copies of the plain Triton kernels with a mask in each tile, for the ladder. Imports Triton.

``kernels.py`` runs each loop over tiles twice, without a mask and with one. Here all goes through
the loop with a mask, whose loads are not pipelined; with ``EVERY`` so do the tiles above the
diagonal, of which no query sees a key.
"""

import functools
import types

import triton
import triton.language as tl

from a2lib.attention import kernels
from a2lib.attention.kernels import _dkdv_tiles, visible_keys

EVERY = tl.constexpr(False)


@triton.jit
def _keys(m0, Nk, Bq: tl.constexpr, Bk: tl.constexpr, CAUSAL: tl.constexpr):
    """Stand in for ``visible_keys``: no key is seen whole."""
    whole, stop = visible_keys(m0, Nk, Bq, Bk, CAUSAL and not EVERY)
    return 0, stop


@triton.jit
def _queries(
    dk, dv, k, v, Q, DO, LSE, DELTA, stride_qn, stride_don, n0, start, stop, jump, skip, Nq, scale,
    Bq: tl.constexpr, Bk: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, NEEDS_DK: tl.constexpr, NEEDS_DV: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Stand in for ``_dkdv_tiles``: it masks; with EVERY the loop over the diagonal begins at the
    first query."""
    if EVERY and MASK:
        start = start * 0
    return _dkdv_tiles(
        dk, dv, k, v, Q, DO, LSE, DELTA, stride_qn, stride_don, n0, start, stop, jump, skip, Nq,
        scale, Bq, Bk, d, BD, CAUSAL, True, NEEDS_DK, NEEDS_DV, PRECISION, STAGES,
    )  # fmt: skip


@functools.cache
def kernel(name, every):
    """A copy of the function ``name`` of ``kernels``."""
    instead = {"EVERY": tl.constexpr(every)}
    inner = {"visible_keys": _copy(_keys, instead), "_dkdv_tiles": _copy(_queries, instead)}
    return _copy(getattr(kernels, name), inner, do_not_specialize=kernels.SIZES)


def _copy(jitted, instead, **options):
    """A Triton function of the same source whose globals are others."""
    fn = jitted.fn
    made = types.FunctionType(fn.__code__, {**fn.__globals__, **instead}, fn.__name__)
    made.__annotations__, made.__module__ = fn.__annotations__, fn.__module__
    return triton.jit(**options)(made)

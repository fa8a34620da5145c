"""Check the arguments of every attention here, and lay out what the kernels read and write."""

import math
import numbers

import numpy as np
import torch
from torch import Tensor

from a2lib.errors import UnsupportedError

# Within a tile (at most 128 rows) the kernels' offsets are 32-bit.
ROW_STRIDE_MAX = 2**31 // 128 - 1
# The kernels take the scale as a float32 that is neither infinite nor flushed to zero.
SCALE_MIN, SCALE_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Check q ``(..., H, Nq, d)`` against k, v ``(..., H_kv, Nk, d)``, and return ``H // H_kv``.

    Raises, in one line, TypeError where one is no tensor and ValueError where shapes, dtypes or
    devices do not fit each other.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        kinds = ", ".join(type(x).__name__ for x in (q, k, v))
        raise TypeError(f"q, k and v must be PyTorch tensors; got {kinds}")
    if q.dim() < 2 or k.dim() != q.dim():
        wanted = "(..., length, head_dim) of one rank"
        raise ValueError(f"q, k and v must be {wanted}; got {_shapes(q, k, v)}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape; got {_shapes(q, k, v)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k and v must have the same head_dim; got {_shapes(q, k, v)}")
    if q.shape[-1] == 0:
        raise ValueError(f"head_dim must be at least 1; got {_shapes(q, k, v)}")
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ValueError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if len({q.device, k.device, v.device}) > 1:
        devices = f"{q.device}, {k.device}, {v.device}"
        raise ValueError(f"q, k and v must be on one device; got {devices}")
    if not q.is_floating_point():
        raise ValueError(f"attention takes floating-point tensors; got {q.dtype}")
    if q.dim() == 2:
        return 1
    heads, kv_heads = q.shape[-3], k.shape[-3]
    grouped = heads == kv_heads or (heads > 0 and kv_heads > 0 and heads % kv_heads == 0)
    if q.shape[:-3] != k.shape[:-3] or not grouped:
        raise ValueError(
            "q's leading dimensions must be those of k and v, the last (heads) or a whole "
            f"multiple of it; got {_shapes(q, k, v)}"
        )
    return heads // kv_heads if kv_heads else 1


def check_scale(scale) -> float:
    """Return ``scale`` as a float. Raises TypeError or ValueError unless it is a finite float32
    above 0: the kernels mask and take maxima before they scale.

    A tensor is refused: no gradient would reach it.
    """
    if isinstance(scale, Tensor):
        raise TypeError("scale must be a Python number: no gradient flows to it; got a tensor")
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a number or None; got {scale!r}")
    # torch.compile cannot trace math.isfinite, and float() of a large int is no ValueError.
    if not SCALE_MIN <= scale <= SCALE_MAX:
        limits = f"{SCALE_MIN:.1e} to {SCALE_MAX:.1e}"
        raise ValueError(f"scale must be a finite number above 0 ({limits}); got {scale}")
    return float(scale)


def check_is_causal(is_causal) -> bool:
    """Return ``is_causal`` as a bool. Raises TypeError unless it is one, of Python or NumPy."""
    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(f"is_causal must be True or False; got {is_causal!r}")
    return bool(is_causal)


def check_distinct(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UnsupportedError where an ``autograd.Function`` is compiled for one tensor given twice.

    torch 2.11 merges arguments of a Function that are one tensor, and loses a gradient in silence.
    """
    if q is k or q is v or k is v:
        raise UnsupportedError(
            "torch.compile of an autograd.Function needs three different tensors q, k and v, since "
            "PyTorch may lose a gradient of one given twice; call flash_attention"
        )


NO_SECOND_DERIVATIVE = (
    "FlashAttention has no second derivative: call backward without create_graph=True, or use "
    "attention_reference, which can be differentiated twice"
)


def check_first_derivative(line: str = NO_SECOND_DERIVATIVE) -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated itself.

    Gradients are computed with autograd on only where someone may differentiate them. Compiled
    backward passes are refused by PyTorch, or by the operator they call.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(line)


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def as_batched_heads(x: Tensor) -> Tensor:
    """View ``(..., H, N, d)`` as ``(B, H, N, d)`` with d contiguous, copying only if it must.

    Returns another object than x. It must copy where d is not contiguous, where leading dimensions
    cannot be merged in place, and where rows lie more than ROW_STRIDE_MAX elements apart.
    """
    if x.dim() > 4:
        x = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    else:
        x = x[(None,) * (4 - x.dim())]
    fits = (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) <= ROW_STRIDE_MAX
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def empty_output(x: Tensor) -> Tensor:
    """Return an uninitialised tensor like x, whose layout follows from the shape alone.

    ``(..., H, N, d)`` lies in memory as ``(..., N, H, d)``, which is how a model merges heads and
    how its projections leave them; with up to three dimensions it is contiguous. Never x's strides:
    torch.compile fixes strides when it traces, and may hand over others when it runs.
    """
    if x.dim() < 4 or x.shape[-3] * x.shape[-1] > ROW_STRIDE_MAX:
        return x.new_empty(x.shape)
    # Not a transposed view of a contiguous tensor: autograd refuses to change such a view in place.
    *leading, heads, length, d = x.shape
    row = d * torch.sym_max(heads, 1)
    strides, step = [d, row, 1], row * torch.sym_max(length, 1)
    for n in reversed(leading):
        strides.insert(0, step)
        step = step * torch.sym_max(n, 1)
    return x.new_empty_strided(x.shape, strides)

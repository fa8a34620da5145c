"""What every attention here asks of its inputs, and the one layout the kernels read."""

import math

import torch
from torch import Tensor

# Within a tile (at most 128 rows) the kernels' offsets are 32-bit.
ROW_STRIDE_MAX = 2**31 // 128 - 1


class UnsupportedError(RuntimeError):
    """This implementation cannot run these inputs here; the message says why and what can."""


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Check q ``(..., H, Nq, d)`` against k, v ``(..., H_kv, Nk, d)``; returns ``H // H_kv``.

    Raises ValueError, in one line, where shapes, dtypes or devices do not fit each other.
    """
    if q.dim() < 2 or k.dim() != q.dim():
        wanted = "(..., length, head_dim) of one rank"
        raise ValueError(f"q, k and v must be {wanted}; got {_shapes(q, k, v)}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape; got {_shapes(q, k, v)}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k and v must have the same head_dim; got {_shapes(q, k, v)}")
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


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def as_batched_heads(x: Tensor) -> Tensor:
    """View ``(..., H, N, d)`` as ``(B, H, N, d)`` with d contiguous, copying only if it must.

    It must where d is not contiguous, where leading dimensions cannot be merged in place, and
    where rows lie more than ROW_STRIDE_MAX elements apart.
    """
    if x.dim() < 4:
        x = x[(None,) * (4 - x.dim())]
    elif x.dim() > 4:
        x = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    fits = (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) <= ROW_STRIDE_MAX
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def empty_like(x: Tensor) -> Tensor:
    """An uninitialised tensor of x's shape, in x's layout where that has d contiguous."""
    out = torch.empty_like(x)
    if out.stride(-1) == 1 or out.shape[-1] == 1:
        return out
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)

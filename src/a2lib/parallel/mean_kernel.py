"""The mean of what the ranks sent, in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def launch_mean_kernel(own: Tensor, others: Tensor, mean: Tensor, rank: int) -> None:
    """Do on a GPU what `copy_engines.mean_of_parts_plain` does."""
    n = own.numel()
    _mean_kernel[(triton.cdiv(n, BLOCK),)](
        own,
        others,
        mean,
        n,
        others.stride(0),
        RANK=rank,
        WORLD=len(others) + 1,
        WIDE=tl.float64 if mean.dtype == torch.float64 else tl.float32,
        BLOCK=BLOCK,
    )


@triton.jit
def _mean_kernel(
    own_ptr,
    others_ptr,
    mean_ptr,
    n,
    row,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.zeros((BLOCK,), WIDE)
    for r in tl.static_range(WORLD):
        if r == RANK:
            part = tl.load(own_ptr + at, mask=inside, other=0.0)
        elif r < RANK:
            part = tl.load(others_ptr + tl.cast(r, tl.int64) * row + at, mask=inside, other=0.0)
        else:
            part = tl.load(others_ptr + tl.cast(r - 1, tl.int64) * row + at, mask=inside, other=0.0)
        total += tl.cast(part, WIDE)
    # Not a product with 1 / WORLD, nor an approximate quotient: the plain twin's bits.
    mean = tl.div_rn(total, WORLD * 1.0) if WIDE == tl.float32 else total / WORLD
    tl.store(mean_ptr + at, tl.cast(mean, mean_ptr.dtype.element_ty), mask=inside)

"""The means of what the ranks sent, of several tensors in one launch and one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from a2lib.parallel.copy_engines import Layout

BLOCK = 4096
TENSORS = 8  # of a launch, a power of two; each costs the host an argument
LINE = 16  # elements: what begins or ends at a multiple of so many is read in whole lines


class MeanKernel:
    """Writes the means of this rank's parts of tensors and of what it received of the others',
    which may go to where its own parts are: added in rank order in float32 (float64 for float64)
    and rounded once. ``TENSORS`` tensors a launch."""

    def __init__(
        self, layout: Layout, rank: int, world_size: int, device: torch.device, block: int = BLOCK
    ) -> None:
        self._rank, self._world_size, self._block = rank, world_size, block
        self._launches = []  # first tensor, blocks, table, whether parts are whole lines
        for begin in range(0, len(layout.counts), TENSORS):
            here = slice(begin, begin + TENSORS)
            counts = layout.counts[here]
            own_at = layout.own_at[here]
            whole_lines = all(number % LINE == 0 for number in counts + own_at)
            firsts, blocks = [], 0
            for count in counts:
                firsts.append(blocks)
                blocks += triton.cdiv(count, block)
            columns = [firsts, counts, own_at, layout.rows[here], layout.received_at[here]]
            columns.append(layout.means_at[here])
            for column in columns:
                # What is not there begins behind the last block.
                column += [blocks] * (TENSORS - len(column))
            # On the GPU: as arguments, each other number would be compiled for.
            table = torch.tensor(columns, dtype=torch.int64, device=device)
            if blocks:
                self._launches.append((begin, blocks, table, whole_lines))

    def __call__(self, tensors: Sequence[Tensor], received: Tensor, means: Tensor) -> None:
        for begin, blocks, table, whole_lines in self._launches:
            here = tuple(tensors[begin : begin + TENSORS])
            here += here[-1:] * (TENSORS - len(here))
            _mean_kernel[(blocks,)](
                here,
                received,
                means,
                table,
                RANK=self._rank,
                WORLD=self._world_size,
                WIDE=tl.float64 if means.dtype == torch.float64 else tl.float32,
                TENSORS=TENSORS,
                LINE=LINE,
                WHOLE_LINES=whole_lines,
                BLOCK=self._block,
            )


@triton.jit
def _mean_kernel(
    tensor_ptrs,
    received_ptr,
    means_ptr,
    table_ptr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    WIDE: tl.constexpr,
    TENSORS: tl.constexpr,
    LINE: tl.constexpr,
    WHOLE_LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    firsts = tl.load(table_ptr + tl.arange(0, TENSORS))
    tensor = tl.sum((firsts <= block).to(tl.int32), 0) - 1
    own_ptr = tensor_ptrs[0]
    for other in tl.static_range(1, TENSORS):
        if tensor == other:
            own_ptr = tensor_ptrs[other]
    first = tl.load(table_ptr + tensor)
    n = tl.load(table_ptr + TENSORS + tensor)
    own_at = tl.load(table_ptr + 2 * TENSORS + tensor)
    if WHOLE_LINES:
        n = tl.multiple_of(n, LINE)
        own_at = tl.multiple_of(own_at, LINE)
    own_ptr += own_at
    row = tl.multiple_of(tl.load(table_ptr + 3 * TENSORS + tensor), LINE)
    received_ptr += tl.multiple_of(tl.load(table_ptr + 4 * TENSORS + tensor), LINE)
    means_ptr += tl.multiple_of(tl.load(table_ptr + 5 * TENSORS + tensor), LINE)
    at = (block - first) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.zeros((BLOCK,), WIDE)
    for r in tl.static_range(WORLD):
        if r == RANK:
            part = tl.load(own_ptr + at, mask=inside, other=0.0)
        elif r < RANK:
            part = tl.load(received_ptr + r * row + at, mask=inside, other=0.0)
        else:
            part = tl.load(received_ptr + (r - 1) * row + at, mask=inside, other=0.0)
        total += tl.cast(part, WIDE)
    # Not a product with 1 / WORLD, nor an approximate quotient: the plain twin's bits.
    mean = tl.div_rn(total, WORLD * 1.0) if WIDE == tl.float32 else total / WORLD
    tl.store(means_ptr + at, tl.cast(mean, means_ptr.dtype.element_ty), mask=inside)

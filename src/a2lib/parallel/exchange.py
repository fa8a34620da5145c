"""Parameters that each have one owner, brought to all ranks a chunk at a time.

A chunk lies in one tensor of a row for each rank, the parameters of that rank side by side, and
parameters *are* views of it: an all-gather in place moves what has to move, in both directions of
every link at once, and nothing is copied. While a chunk travels the next one is updated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from a2lib.parallel.group import all_gather_single
from a2lib.theory.sharding import CHUNKS

# CHUNKS of a dtype, but none below so many bytes: what is exposed is the update of the first one or
# the transfer of the last.
LEAST_BYTES = 2**26
# A parameter begins at a multiple of these, as the allocator would have it begin at 512.
ALIGN_BYTES = 256


def cut(shares: Sequence[Sequence[int]], chunks: int) -> list[list[list[int]]]:
    """For each chunk and rank the places in the rank's share of what is in it, given sizes.

    Every rank's share is cut at the same fractions of its bytes, largest first, so that the rows
    of a chunk are as long as each other but for one size.
    """
    found: list[list[list[int]]] = [[[] for _ in shares] for _ in range(chunks)]
    for rank, sizes in enumerate(shares):
        total, before = sum(sizes), 0
        for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            middle = before + sizes[i] / 2
            place = int(chunks * middle / total) if total else 0
            found[min(place, chunks - 1)][rank].append(i)
            before += sizes[i]
    return [chunk for chunk in found if any(chunk)]


def lay_out(shares: Sequence[Sequence[Tensor]]) -> list[Chunk]:
    """The chunks of parameters of one dtype and device, those of each rank in ``shares``."""
    sizes = [[p.numel() * p.element_size() for p in share] for share in shares]
    chunks = max(1, min(CHUNKS, sum(map(sum, sizes)) // LEAST_BYTES))
    return [
        Chunk([[share[i] for i in places] for share, places in zip(shares, chunk, strict=True)])
        for chunk in cut(sizes, chunks)
    ]


class Chunk:
    """Some parameters of each rank, ``params[rank]``, in memory that stays at one address.

    A parameter that is contiguous and has memory of its own is moved into the chunk; any other is
    copied in before and out after. A rank without parameters sends its row too.
    """

    @torch.no_grad()
    def __init__(self, params: Sequence[Sequence[Tensor]]) -> None:
        self.params = params
        first = next(p for share in params for p in share)
        width = max(sum(map(_room, share)) for share in params)
        self._rows = torch.empty(len(params), width, dtype=first.dtype, device=first.device)
        # Those that lie here and where; those that are copied, by rank, and their places.
        self._moved: list[tuple[Tensor, int]] = []
        self._copied: list[tuple[list[Tensor], list[Tensor]]] = []
        for row, share in zip(self._rows, params, strict=True):
            copied, places, begin = [], [], 0
            for p in share:
                place = row[begin : begin + p.numel()].view(p.shape)
                begin += _room(p)
                if _movable(p):
                    place.copy_(p)
                    p.data = place
                    p._moved_to = place.data_ptr()
                    self._moved.append((p, place.data_ptr()))
                elif p.numel():
                    copied.append(p)
                    places.append(place)
            self._copied.append((copied, places))
        self._work: dist.Work | None = None

    @property
    def padding_bytes(self) -> int:
        """What the chunk takes beyond its parameters, copies of those that were not moved too."""
        moved = sum(p.numel() * p.element_size() for p, _ in self._moved)
        return self._rows.numel() * self._rows.element_size() - moved

    def stays(self) -> bool:
        """Whether each parameter that was moved here is still here."""
        return all(p.data_ptr() == where for p, where in self._moved)

    def start(self, rank: int, group: dist.ProcessGroup | None) -> None:
        """Send this rank's row, behind what the current stream has queued; receive the others'."""
        copied, places = self._copied[rank]
        if copied:
            torch._foreach_copy_(places, copied)
        if self._rows.numel():
            self._work = all_gather_single(
                self._rows.view(-1), self._rows[rank], group=group, async_op=True
            )

    def finish(self, rank: int) -> None:
        """Let the current stream wait for the others' rows, and copy out what is to be copied."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        for other, (copied, places) in enumerate(self._copied):
            if copied and other != rank:
                torch._foreach_copy_(copied, places)


def _room(p: Tensor) -> int:
    """Elements that a parameter takes in its row."""
    align = max(1, ALIGN_BYTES // p.element_size())
    return -(-p.numel() // align) * align


def _movable(p: Tensor) -> bool:
    """Whether nothing else lies in the memory of ``p``, or it lies in a chunk already."""
    if not p.numel() or not p.is_contiguous() or type(p.data) is not Tensor:
        return False
    alone = p.untyped_storage().nbytes() == p.numel() * p.element_size()
    return alone or getattr(p, "_moved_to", None) == p.data_ptr()

"""Parameters that each have one owner, brought to all ranks a chunk at a time.

A chunk lies in one tensor of a row for each rank, the parameters of that rank side by side, and
parameters *are* views of it: an all-gather in place moves what has to move, in both directions of
every link at once, and nothing is copied. While a chunk travels the next one is updated. Rows are
as long as the longest, so that a parameter much larger than the rest would pad all others to its
size, W - 1 times: such a one is broadcast, which is no slower than the gather of that padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from a2lib.parallel.group import all_gather_single
from a2lib.parallel.owners import CHUNKS
from a2lib.parallel.tensors import copy_all, round_up

# CHUNKS of a dtype, but none below so many bytes: what is exposed is the update of the first one or
# the transfer of the last.
LEAST_BYTES = 2**26
# A parameter begins at a multiple of these, as the allocator would have it begin at 512.
ALIGN_BYTES = 256
# Of a chunk, what may be padding: this part, or so many bytes, of which nobody would notice.
MOST_PADDING = 1 / 16
PADDING_BYTES = 2**20


def cut(shares: Sequence[Sequence[int]], chunks: int) -> list[list[list[int]]]:
    """Return for each chunk and rank the places in the rank's share of what is in it, given sizes.

    Every rank's share is cut at the same fractions of its bytes, largest first, so that the rows
    of a chunk are as long as each other but for one size.
    """
    places: list[list[list[int]]] = []
    for _ in range(chunks):
        places.append([[] for _ in shares])
    for rank, sizes in enumerate(shares):
        total, before = sum(sizes), 0
        largest_first = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
        for i in largest_first:
            middle = before + sizes[i] / 2
            chunk = int(chunks * middle / total) if total else 0
            places[min(chunk, chunks - 1)][rank].append(i)
            before += sizes[i]
    return [chunk for chunk in places if any(chunk)]


def lay_out(shares: Sequence[Sequence[Tensor]]) -> list[Chunk]:
    """Return the chunks of parameters of one dtype and device, those of each rank in ``shares``."""
    sizes, total = [], 0
    for share in shares:
        sizes.append([p.nbytes for p in share])
        total += sum(sizes[-1])
    chunks = []
    for places in cut(sizes, max(1, min(CHUNKS, total // LEAST_BYTES))):
        params = []
        for share, in_share in zip(shares, places, strict=True):
            params.append([share[i] for i in in_share])
        chunks.append(Chunk(params))
    return chunks


def sticking_out(shares: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Return which of a chunk's parameters, (rank, place in its share), are not to be in its rows,
    given sizes: the largest of the longest row, as long as rows are padded by too much."""
    rows, lengths = [], []
    for share in shares:
        rows.append(sorted(range(len(share)), key=share.__getitem__))
        lengths.append(sum(share))
    out = set()
    while True:
        longest = lengths.index(max(lengths))
        padding = len(rows) * lengths[longest] - sum(lengths)
        if padding <= max(MOST_PADDING * sum(lengths), PADDING_BYTES):
            return out
        largest = rows[longest].pop()
        lengths[longest] -= shares[longest][largest]
        out.add((longest, largest))


class Chunk:
    """Some parameters of each rank, ``params[rank]``, in memory that stays at one address.

    A parameter that is contiguous and has memory of its own is moved into the chunk; any other is
    copied in before and out after. A rank without parameters sends its row too. What would make
    one rank's row much longer than the others' is broadcast by itself, from where it is.
    """

    def __init__(self, params: Sequence[Sequence[Tensor]]) -> None:
        self.params = params
        self._out = sticking_out(_rooms_in_bytes(params))
        self._rows = self._new_rows()
        # What is broadcast, with its rank. Parameters that are sent from where they lie, and where.
        self._broadcast: list[tuple[int, Tensor]] = []
        self._placed: list[tuple[Tensor, int]] = []
        # Those that are copied, by rank, and their places.
        self._copied: list[tuple[list[Tensor], list[Tensor]]] = []
        for rank in range(len(params)):
            self._place(rank)
        self._works: list[dist.Work] = []

    def _new_rows(self) -> Tensor:
        longest = 0
        for rank, share in enumerate(self.params):
            length = 0
            for i, p in enumerate(share):
                if (rank, i) not in self._out:
                    length += _room(p)
            longest = max(longest, length)
        first = next(itertools.chain(*self.params))
        return torch.empty(len(self.params), longest, dtype=first.dtype, device=first.device)

    @torch.no_grad()
    def _place(self, rank: int) -> None:
        """Give each parameter of a rank the place that it is sent from."""
        copied, places, begin = [], [], 0
        for i, p in enumerate(self.params[rank]):
            if (rank, i) in self._out:
                place = p.detach().contiguous()  # where it lies, or a copy
                self._broadcast.append((rank, place.view(-1)))
            else:
                place = self._rows[rank, begin : begin + p.numel()].view(p.shape)
                begin += _room(p)
                if _movable(p):
                    place.copy_(p)
                    p.data = place
                    p._moved_to = place.data_ptr()
            if not p.numel():
                continue
            if place.data_ptr() == p.data_ptr():
                self._placed.append((p, p.data_ptr()))
            else:
                copied.append(p)
                places.append(place)
        self._copied.append((copied, places))

    def stays(self) -> bool:
        """Return whether each parameter that is sent from where it lies is still there."""
        return all(p.data_ptr() == where for p, where in self._placed)

    def start(self, rank: int, group: dist.ProcessGroup | None) -> None:
        """Send what is this rank's, behind what the current stream has queued; receive the rest."""
        copied, places = self._copied[rank]
        copy_all(places, copied)
        # As bytes: not every backend sends every dtype.
        if self._rows.numel():
            rows = self._rows.view(torch.uint8)
            gather = all_gather_single(rows.view(-1), rows[rank], group=group, async_op=True)
            self._works.append(gather)
        for owner, flat in self._broadcast:
            sent = flat.view(torch.uint8)
            self._works.append(dist.broadcast(sent, group=group, group_src=owner, async_op=True))

    def finish(self, rank: int) -> None:
        """Let the current stream wait for what is received, and copy out what is to be copied."""
        while self._works:
            self._works.pop(0).wait()
        for other, (copied, places) in enumerate(self._copied):
            if other != rank:
                copy_all(copied, places)


def _rooms_in_bytes(shares: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    rooms = []
    for share in shares:
        rooms.append([_room(p) * p.element_size() for p in share])
    return rooms


def _room(p: Tensor) -> int:
    """Return the elements that a parameter takes in its row."""
    return round_up(p.numel(), max(1, ALIGN_BYTES // p.element_size()))


def _movable(p: Tensor) -> bool:
    """Return whether nothing else lies in the memory of ``p``, or it lies in a chunk already."""
    if not p.numel() or not p.is_contiguous() or type(p.data) is not Tensor:
        return False
    alone = p.untyped_storage().nbytes() == p.nbytes
    return alone or getattr(p, "_moved_to", None) == p.data_ptr()

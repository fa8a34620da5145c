"""Parameters that each have one owner, brought to all ranks a chunk at a time.

A chunk lies in one tensor of a row for each rank, the parameters of that rank side by side, and
parameters *are* views of it: an all-gather in place moves what has to move, in both directions of
every link at once, and nothing is copied. While a chunk travels the next one is updated. Rows are
as long as the longest, so that a parameter much larger than the rest would pad all others to its
size, W - 1 times: of such a chunk each parameter is broadcast from where it lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from a2lib.owners import CHUNKS, largest_first
from a2lib.parallel.group import all_gather_single
from a2lib.parallel.tensors import round_up

# CHUNKS of a dtype, but none below so many bytes: what is exposed is the update of the first one or
# the transfer of the last.
LEAST_BYTES = 2**26
# A parameter begins at a multiple of these, as the allocator would have it begin at 512.
ALIGN_BYTES = 256
# Of a chunk, what may be padding: this part, or so many bytes, of which nobody would notice.
MOST_PADDING = 1 / 4
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
        for i in largest_first(sizes):
            middle = before + sizes[i] / 2
            chunk = int(chunks * middle / total) if total else 0
            places[min(chunk, chunks - 1)][rank].append(i)
            before += sizes[i]
    return list(filter(any, places))  # a chunk that no rank has anything in is none


def lay_out(shares: Sequence[Sequence[Tensor]]) -> list[Chunk]:
    """Return the chunks of parameters of one dtype and device, those of each rank in ``shares``."""
    sizes, total = [], 0
    for share in shares:
        sizes.append([p.nbytes for p in share])
        total += sum(sizes[-1])
    number = max(1, min(CHUNKS, total // LEAST_BYTES))
    chunks = []
    for places in cut(sizes, number):
        params = []
        for share, in_share in zip(shares, places, strict=True):
            params.append(list(map(share.__getitem__, in_share)))
        chunks.append(Chunk(params))
    return chunks


class Chunk:
    """Some parameters of each rank, ``params[rank]``, in memory that stays at one address.

    Parameters are moved into the chunk's rows, and keep their strides. A rank without parameters
    sends its row too. Where rows would be padded by too much there are none: each parameter is
    broadcast, from where it is, or from memory of its own if it is not contiguous.
    """

    @torch.no_grad()
    def __init__(self, params: Sequence[Sequence[Tensor]]) -> None:
        self.params = params
        every = list(itertools.chain(*params))
        lengths = [sum(map(_room, share)) for share in params]
        padding = len(params) * max(lengths) - sum(lengths)
        item_bytes = every[0].element_size()
        has_rows = padding <= max(MOST_PADDING * sum(lengths), PADDING_BYTES / item_bytes)
        longest = max(lengths) if has_rows else 0
        self._rows = every[0].new_empty(len(params), longest)
        self._broadcast: list[tuple[int, Tensor]] = []  # each with its rank
        for rank, share in enumerate(params):
            begin = 0
            for p in share:
                if has_rows:
                    _move(p, self._rows[rank, begin : begin + p.numel()])
                    begin += _room(p)
                    continue
                if not p.is_contiguous():
                    _move(p, p.new_empty(p.numel()))
                self._broadcast.append((rank, p.detach().as_strided((p.numel(),), (1,))))
        self._addresses: list[tuple[Tensor, int]] = []
        for p in every:
            if p.numel():
                self._addresses.append((p, p.data_ptr()))
        self._works: list[dist.Work] = []

    def stays(self) -> bool:
        """Return whether each parameter is still where it is sent from."""
        return all(p.data_ptr() == address for p, address in self._addresses)

    def start(self, rank: int, group: dist.ProcessGroup | None) -> None:
        """Send what is this rank's, behind what the current stream has queued; receive the rest."""
        # As bytes: not every backend sends every dtype.
        if self._rows.numel():
            rows = self._rows.view(torch.uint8)
            gather = all_gather_single(rows.view(-1), rows[rank], group=group, async_op=True)
            self._works.append(gather)
        for owner, flat in self._broadcast:
            sent = flat.view(torch.uint8)
            self._works.append(dist.broadcast(sent, group=group, group_src=owner, async_op=True))

    def finish(self) -> None:
        """Let the current stream wait for what is received."""
        while self._works:
            self._works.pop(0).wait()


def _move(p: Tensor, flat: Tensor) -> None:
    """Have a parameter in other memory, in its strides as far as they leave no gaps."""
    place = flat.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
    p.data = place.copy_(p)


def _room(p: Tensor) -> int:
    """Return the elements that a parameter takes in its row."""
    return round_up(p.numel(), max(1, ALIGN_BYTES // p.element_size()))

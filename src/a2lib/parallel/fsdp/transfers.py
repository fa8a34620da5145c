"""How a unit's parameters are gathered and its gradients reduced: by collectives of the group's
backend, or by copy engines, which leave the multiprocessors to the matmuls beside them.

With copy engines (``copy_engines``, between GPUs of one host)

- to gather, each rank casts its rows into memory that all ranks reach, and copies every rank's
  slots from there to where the unit lies;
- to reduce, each rank writes the others' rows of its gradients, as backward made them, into slots
  of their owners, which take the mean by kernels: in rank order, in float32, rounded once.

A barrier stands before each of the two and one in its middle. Behind the first one nobody uses the
memory any more: a rank comes to it behind all that its lane did before. Behind the second one all
have written. So every gather and reduction of every unit has the same memory, as much as the
largest one needs, and nothing is remembered on the host: a CUDA graph may be replayed between other
steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from a2lib.parallel.copy_engines import (
    ALIGN,
    SharedMemory,
    Slots,
    reduce_scatter,
    slot_bytes,
    slots,
)
from a2lib.parallel.fsdp.shards import Sharded
from a2lib.parallel.group import all_gather_coalesced, member, reduce_scatter_coalesced
from a2lib.parallel.tensors import copy_all, round_up


@dataclass(frozen=True)
class Prepared:
    """Gradients on their way, of parameters whose masters have one dtype: of each the whole, which
    is sent, and the room for this rank's slot of the mean."""

    parameters: list[Sharded]
    wholes: list[Tensor]
    rooms: list[Tensor]


class BackendTransfer:
    """The all-gather and the reduce-scatter of one unit by NCCL or gloo, of several tensors a call.

    ``own_slots`` are this rank's slots of the parameters, which it fills before they are gathered:
    here where the whole lies.
    """

    def __init__(self, sharded: list[Sharded], group: dist.ProcessGroup | None) -> None:
        self._group = group
        rank, _ = member(group)
        self.own_slots = [p.slot_of(rank) for p in sharded]
        # As bytes, whatever the dtype: not every backend sends every one.
        self._wholes = [p.buffer.data.view(torch.uint8) for p in sharded]
        self._own_bytes = [slot.view(torch.uint8) for slot in self.own_slots]

    def begin_gather(self) -> None:
        """Wait until the slots may be filled; here they always may."""

    def gather(self) -> None:
        """Fill the whole parameters with the slots of all ranks."""
        if self._wholes:
            all_gather_coalesced(self._wholes, self._own_bytes, self._group)

    def prepare(self, same: list[Sharded]) -> Prepared:
        """Take the gradients of parameters whose masters have one dtype, and cast and pad where
        that is needed; none counts as zero."""
        dtype, device = same[0].master.dtype, same[0].master.device
        _, rooms = side_by_side([p.slot for p in same], dtype, device)
        wholes = [p.take_whole_gradient() for p in same]
        # Places in the lists, and sizes, of what does not travel as it is.
        others, sizes = [], []
        for i, p in enumerate(same):
            if not p.can_send(wholes[i]):
                others.append(i)
                sizes.append(p.size)
        if others:
            targets, sources = [], []
            _, padded = side_by_side(sizes, dtype, device)
            for i, whole in zip(others, padded, strict=True):
                gradient, wholes[i] = wholes[i], whole
                if gradient is None:
                    whole.zero_()
                    continue
                if gradient.numel() < whole.numel():
                    whole[gradient.numel() :].zero_()
                targets.append(whole[: gradient.numel()])
                sources.append(gradient)
            copy_all(targets, sources)
        return Prepared(same, wholes, rooms)

    def reduce(self, prepared: Prepared) -> None:
        """Fill the rooms with this rank's slots of the means."""
        reduce_scatter_coalesced(prepared.rooms, prepared.wholes, self._group)


class CopiedTransfer:
    """The same by copy engines; ``own_slots`` are in the memory that all ranks reach."""

    def __init__(self, sharded: list[Sharded], shared: SharedMemory) -> None:
        self._shared, rank = shared, shared.rank
        begins, begin = [], 0
        for p in sharded:
            begins.append(begin)
            begin += slot_bytes(p.parts(), p.shown_dtype)
        self.own_slots = []
        for p, begin in zip(sharded, begins, strict=True):
            self.own_slots.append(shared.view(rank, begin, p.slot, p.shown_dtype))
        # Of every rank a slot of the whole, and where that rank has it.
        self._slots: list[tuple[Tensor, Tensor]] = []
        for other in (rank, *shared.others()):
            for p, begin in zip(sharded, begins, strict=True):
                slot = p.slot_of(other).view(torch.uint8)
                self._slots.append((slot, shared.view(other, begin, slot.numel(), torch.uint8)))
        self._divided: dict[Sharded, Slots] = {}
        end = 0
        for p in sharded:
            self._divided[p], end = slots(shared, end, p.parts(), p.shown_dtype)

    def begin_gather(self) -> None:
        self._shared.barrier()  # nobody reads the slots any more

    def gather(self) -> None:
        self._shared.barrier()  # all have filled theirs
        for slot, there in self._slots:
            slot.copy_(there)

    def prepare(self, same: list[Sharded]) -> Prepared:
        """Take the gradients as they are; none counts as zero."""
        _, rooms = side_by_side([p.slot for p in same], same[0].master.dtype, same[0].master.device)
        wholes = []
        for p in same:
            gradient = p.take_whole_gradient()
            if gradient is None:
                count = p.shape.numel()
                gradient = torch.zeros(count, dtype=p.shown_dtype, device=p.master.device)
            wholes.append(gradient)
        return Prepared(same, wholes, rooms)

    def reduce(self, prepared: Prepared) -> None:
        self._shared.barrier()  # nobody reads the slots any more
        divided = [self._divided[p] for p in prepared.parameters]
        reduce_scatter(self._shared, divided, prepared.wholes, prepared.rooms)


def shared_bytes(sharded: list[Sharded], world_size: int) -> int:
    """Return the bytes of each rank that the transfers of a unit need: slots for the others'
    gradients, which the slots that are gathered are no larger than."""
    return sum(slot_bytes(p.parts(), p.shown_dtype) for p in sharded) * (world_size - 1)


def side_by_side(
    sizes: list[int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Return a new tensor and its parts of so many elements, each at a multiple of ``ALIGN`` bytes,
    and nothing in what lies between."""
    unit = max(1, ALIGN // dtype.itemsize)
    steps = [round_up(size, unit) for size in sizes]
    # The last one needs no room behind it.
    steps[-1] = sizes[-1]
    whole = torch.empty(sum(steps), dtype=dtype, device=device)
    parts = list(whole.split_with_sizes(steps))
    for i, size in enumerate(sizes):
        if steps[i] > size:
            parts[i] = parts[i][:size]
    return whole, parts

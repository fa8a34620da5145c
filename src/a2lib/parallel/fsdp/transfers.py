"""Gather a unit's parameters and reduce its gradients: by collectives of the group's backend, or
by copy engines, which leave the multiprocessors to the matmuls beside them.

With copy engines (``copy_engines``, between GPUs of one host)

- to gather, each rank casts its rows to where the unit lies and into memory that all ranks reach,
  and copies the other ranks' slots from there;
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

from a2lib.parallel.copy_engines import ALIGN, SharedMemory, Slots, slot_bytes
from a2lib.parallel.fsdp.shards import Replicated, Sharded
from a2lib.parallel.group import all_gather_coalesced, reduce_scatter_coalesced
from a2lib.parallel.tensors import copy_all, round_up


class SideBySide:
    """Makes tensors of one dtype that lie in one, each at a multiple of ``ALIGN`` bytes: they begin
    at ``begins``, in elements, and nothing is in what lies between."""

    def __init__(self, shapes: list[torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        unit = max(1, ALIGN // dtype.itemsize)
        self.begins, self._end = [], 0
        self._views: list[tuple[torch.Size, tuple[int, ...], int]] = []
        for shape in shapes:
            begin = round_up(self._end, unit)
            self.begins.append(begin)
            self._views.append((shape, torch.empty(shape, device="meta").stride(), begin))
            self._end = begin + shape.numel()

    def make(self) -> tuple[Tensor, list[Tensor]]:
        """Return a new tensor and its parts."""
        whole = torch.empty(self._end, dtype=self._dtype, device=self._device)
        return whole, [whole.as_strided(*view) for view in self._views]


class Alike:
    """Parameters of a unit that are trained, whose masters have one dtype, and whose wholes have
    one. ``rooms`` is for this rank's slots of the means of their gradients."""

    def __init__(self, parameters: list[Sharded]) -> None:
        self.parameters, first = parameters, parameters[0]
        dtype, device = first.master.dtype, first.master.device
        slots, padded = [], []
        for p in parameters:
            slots.append(p.shape_of_slot)
            padded.append(p.padded_shape)
        self.rooms = SideBySide(slots, dtype, device)
        self._padded = SideBySide(padded, dtype, device)
        are_even = all(p.shape == p.padded_shape for p in parameters)
        self._are_slots = first.shown_dtype == dtype and are_even

    def prepare(self, as_slots: bool) -> Prepared:
        """Take the gradients and room for their means. ``as_slots`` have them all in the masters'
        dtype and padded, a slot for each rank."""
        means, rooms = self.rooms.make()
        wholes = [p.take_whole_gradient() for p in self.parameters]
        if as_slots and not self._are_slots:
            wholes = self._pad(wholes)
        return Prepared(self, wholes, means, rooms)

    def _pad(self, gradients: list[Tensor]) -> list[Tensor]:
        _, wholes = self._padded.make()
        targets = []
        for gradient, whole in zip(gradients, wholes, strict=True):
            if len(gradient) < len(whole):
                whole[len(gradient) :].zero_()
                whole = whole[: len(gradient)]
            targets.append(whole)
        copy_all(targets, gradients)
        return wholes


@dataclass(frozen=True)
class Prepared:
    """Gradients on their way: of each of ``alike`` the whole, which is sent, and the room for this
    rank's slot of the mean, all of which lie in ``means``."""

    alike: Alike
    wholes: list[Tensor]
    means: Tensor
    rooms: list[Tensor]


class BackendTransfer:
    """The all-gather and the reduce-scatter of one unit by NCCL or gloo, of several tensors a
    call."""

    sends_slots = True  # of the gradients

    def __init__(self, sharded: list[Sharded], group: dist.ProcessGroup | None) -> None:
        self._group = group
        own_slots, self._wholes, self._own_bytes = [], [], []
        for p in sharded:
            own_slots.append(p.slot_of(p.rank))
            # As bytes, whatever the dtype: not every backend sends every one.
            self._wholes.append(p.buffer.data.view(torch.uint8))
            self._own_bytes.append(own_slots[-1].view(torch.uint8))
        self._rows, self._masters = _rows_of(sharded, own_slots)

    def gather(self) -> None:
        """Fill the whole parameters with the rows of all ranks."""
        copy_all(self._rows, self._masters)
        if self._wholes:
            all_gather_coalesced(self._wholes, self._own_bytes, self._group)

    def reduce(self, prepared: Prepared) -> None:
        """Fill the rooms with this rank's slots of the means."""
        reduce_scatter_coalesced(prepared.rooms, prepared.wholes, self._group)


class CopiedTransfer:
    """The same by copy engines."""

    sends_slots = False

    def __init__(self, sharded: list[Sharded], alike: list[Alike], shared: SharedMemory) -> None:
        self._shared, rank = shared, shared.rank
        begins, there, here, end = [], [], [], 0
        for p in sharded:
            begins.append(end)
            there.append(shared.view(rank, end, p.slot, p.shown_dtype))
            here.append(p.slot_of(rank))
            end += slot_bytes(p.shares(), p.shown_dtype)
        # To where the others read them, and to where the whole lies.
        self._rows, self._masters = _rows_of([*sharded, *sharded], [*there, *here])
        # Of each other rank a slot of the whole, and where that rank has it.
        self._slots: list[tuple[Tensor, Tensor]] = []
        for other in shared.others():
            for p, begin in zip(sharded, begins, strict=True):
                slot = p.slot_of(other).view(torch.uint8)
                self._slots.append((slot, shared.view(other, begin, slot.numel(), torch.uint8)))
        self._reductions: dict[Alike, Slots] = {}
        for same in alike:
            sizes = [p.shares() for p in same.parameters]
            dtype = same.parameters[0].shown_dtype
            self._reductions[same] = Slots(shared, sizes, same.rooms.begins, dtype)

    def gather(self) -> None:
        self._shared.barrier()  # nobody reads the slots any more
        copy_all(self._rows, self._masters)
        self._shared.barrier()  # all have filled theirs
        for slot, there in self._slots:
            slot.copy_(there)

    def reduce(self, prepared: Prepared) -> None:
        self._shared.barrier()  # nobody reads the slots any more
        self._reductions[prepared.alike].reduce_scatter(prepared.wholes, prepared.means)


def _rows_of(sharded: list[Sharded], slots: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's rows in slots, which have the dtypes that travel, and their masters."""
    rows, masters = [], []
    for p, slot in zip(sharded, slots, strict=True):
        if p.master.numel():
            rows.append(slot[: p.master.numel()].view(p.master.shape))
            masters.append(p.master)
    return rows, masters


def shared_bytes(parameters: list[Sharded | Replicated], world_size: int) -> int:
    """Return the bytes of each rank that the transfers of a unit need: slots for the others'
    gradients, which the slots that are gathered are no larger than."""
    size = 0
    for p in parameters:
        if isinstance(p, Sharded):
            size += slot_bytes(p.shares(), p.shown_dtype)
    return size * (world_size - 1)

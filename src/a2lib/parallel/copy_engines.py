"""An all-reduce by copy engines: GPUs of one host write to each other's memory over NVLink or PCIe.

NCCL's kernels occupy multiprocessors that backward could use. Here each rank owns 1/W of a bucket:

1. It writes the other parts of its gradients into slots of their owners, from where backward left
   them. That is work of the copy engines.
2. Behind a barrier it takes the mean of its own part, of its gradients and its slots, by kernels.
3. It writes the mean to where every rank has its gradients from then on: copy engines again. Behind
   a barrier all of the bucket is there.

The barriers, small kernels too, are PyTorch's symmetric memory's; without multicast. All of a rank
is on one stream, its lane, in order, each bucket behind what backward's stream had queued when it
was sent. Backward goes on beside it, and its gradients are held until the finish. That nothing is
overwritten too early:

- A slot is that of all buckets. The next one is written into it behind the second barrier of this
  one, which its owner reaches behind the kernels that read it.
- Others write a rank's gradients behind the first barrier of the bucket, which the rank reaches
  behind all that it had queued when it sent that: the optimizer's step that read the last means,
  backwards that added to them, and its own messages from there.
- Behind the last bucket's second barrier nobody writes: the finish has none.

The sum is in rank order and in float32 (float64 for float64), rounded once: with two ranks NCCL's
bits, with more those of one process that adds in that order.
"""

import itertools
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from a2lib.parallel.group import everyone, member
from a2lib.parallel.lane import Lane
from a2lib.parallel.tensors import copy_all, round_up

# What is called with the parameters of a bucket whose gradients are the means.
Then = Callable[[Sequence[Tensor]], None]
# Every rank's part of a bucket begins at a multiple of so many bytes.
ALIGN = 128
# At once, in bytes.
KERNEL_ALIGN = 16
# A rank that is gone leaves the others' barrier kernels waiting, which NCCL's watchdog does not
# see. Past this they fail; it is NCCL's own limit.
BARRIER_LIMIT_MS = 600_000
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def why_not(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Return why copy engines cannot serve these ranks, None where they can; collective, and the
    same answer on every rank."""
    _, size = member(group)
    reason, gpu = None, ""
    if device.type != "cuda":
        reason = f"the parameters are on {device.type}, not on GPUs"
    elif size < 2:
        reason = "there is one rank"
    else:
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    reasons, hosts, gpus = zip(*everyone((reason, _host(), gpu), group), strict=True)
    if any(reasons):
        return _first(reasons)
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    # PyTorch refuses it too, but for this variable: a trial on one GPU.
    if len(set(gpus)) < size and os.environ.get(OVERLAPPING) != "1":
        return "several ranks have one GPU"
    return _first(everyone(_unreachable(device, gpus), group))


def _first(reasons: Sequence[str | None]) -> str | None:
    return next(filter(None, reasons), None)


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def _unreachable(device: torch.device, gpus: Sequence[str]) -> str | None:
    here = {}
    for i in range(torch.cuda.device_count()):
        here[str(torch.cuda.get_device_properties(i).uuid)] = i
    mine = torch.cuda.current_device() if device.index is None else device.index
    for other, gpu in enumerate(gpus):
        if gpu not in here:
            return f"rank {other}'s GPU is not visible to every rank"
        if here[gpu] != mine and not torch.cuda.can_device_access_peer(mine, here[gpu]):
            return f"rank {other}'s GPU does not give the others access to its memory"
    return None


# Of each block of this rank, by group and address: the addresses of all ranks' blocks that it was
# met with. PyTorch may keep what is given back, met as it is, and hand it out again. Where garbage
# is not collected at one time, ranks get blocks that were not met with each other, and each would
# wait at its own.
_met: dict[tuple[str, int], list[int]] = {}


def shared_memory(
    size: int, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[Tensor, object]:
    """Return this rank's ``size`` bytes, and the handle with ``get_buffer(rank, ...)`` of every
    rank's and ``barrier``. Collective; the memory stays until the process ends."""
    # PyTorch has no public module yet that gives GPUs each other's memory.
    import torch.distributed._symmetric_memory as symmetric_memory

    whole, aside = group or dist.group.WORLD, []
    while True:
        mine = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        key = whole.group_name, mine.data_ptr()
        addresses, met = zip(*everyone((mine.data_ptr(), _met.get(key)), group), strict=True)
        each = list(addresses)
        are_new = met.count(None) == len(met)
        if are_new or met.count(each) == len(met):
            break
        aside.append(mine)  # held, so that the next one is another
    _met[key] = each
    return mine, symmetric_memory.rendezvous(mine, whole)


class SharedMemory:
    """As many bytes of every rank, that all of them read and write. Collective."""

    def __init__(self, size: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.rank, self.world_size = member(group)
        self.mine, self._handle = shared_memory(max(size, ALIGN), group, device)
        # Where this allocation begins in what the handle counts from.
        first = self._handle.get_buffer(self.rank, (1,), torch.uint8)
        self._shift = self.mine.data_ptr() - first.data_ptr()

    def view(self, rank: int, begin: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return so many elements of a rank's memory from a byte on."""
        at = (self._shift + begin) // dtype.itemsize
        return self._handle.get_buffer(rank, (count,), dtype, at)

    def barrier(self) -> None:
        """Let the current stream wait for that of every rank, and so for what these had queued."""
        self._handle.barrier(channel=0, timeout_ms=BARRIER_LIMIT_MS)


@dataclass
class _Place:
    """Where a parameter's gradient is in this rank's memory: in its shape, and flat, with what is
    free behind it."""

    view: Tensor
    flat: Tensor


@dataclass
class _Piece:
    """One rank's part of a parameter, from ``begin`` to ``end`` of the flat one: ``here`` in
    this rank's memory, and ``there``, its slot at the owner. Where that is this rank ``there`` is
    its slots, a row for each other rank."""

    index: int  # of the parameter in its bucket
    begin: int
    end: int
    here: Tensor
    there: Tensor

    def cut(self, flat: Tensor) -> Tensor:
        if self.end - self.begin == flat.numel():
            return flat  # as most are: a slice costs the host time
        return flat[self.begin : self.end]


@dataclass
class _Part:
    """One rank's part of a bucket; ``here`` and ``there`` as of a piece, of all of them."""

    pieces: list[_Piece]
    here: Tensor
    there: Tensor

    def messages(self, sources: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (what is read, there, here) of each piece, given each parameter's gradient, flat;
        all together where all is read here."""
        messages, all_here = [], True
        for piece in self.pieces:
            cut = piece.cut(sources[piece.index])
            messages.append((cut, piece.there, piece.here))
            all_here = all_here and cut.data_ptr() == piece.here.data_ptr()
        return [(self.here, self.there, self.here)] if all_here else messages


@dataclass
class _Bucket:
    places: list[_Place]
    own: _Part
    others: list[_Part]
    means: list[Tensor]  # of each other's memory, where it has this rank's part


def _part(flat: Tensor, owner: int, there: Tensor, rooms: Sequence[int]) -> _Part:
    """Return the part of a flat bucket that a rank owns, in pieces of the parameters in it."""
    length = there.shape[-1]
    part = _Part([], flat[owner * length : (owner + 1) * length], there)
    start = -owner * length  # of a parameter, from where the part begins
    for index, room in enumerate(rooms):
        first, end = max(start, 0), min(start + room, length)
        if first < end:
            here = part.here[first:end]
            piece = _Piece(index, first - start, end - start, here, there[..., first:end])
            part.pieces.append(piece)
        start += room
    return part


class CopyEngines:
    """Means of buckets of gradients over the ranks of ``group``, in ``dtype``, None their own."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.group, self._device, self._dtype = group, device, dtype
        self._rank, self._world_size = member(group)
        self._lane = Lane(device)
        self._memory: SharedMemory | None = None
        self._slots: SharedMemory | None = None
        self._under_way: torch.cuda.Event | None = None  # where the lane is through with all of it
        # The gradients that the lane reads. Their memory, of backward's stream, would else be that
        # of a later kernel there before it has read them.
        self._held: list[Tensor] = []

    def lay_out(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Give each bucket of parameters its memory, the first time by taking it. Gradients that
        are there move out of it. Nothing is under way."""
        sizes = [self._padded(params) for params in buckets]
        every = list(itertools.chain(*buckets))
        if self._memory is None:
            total = 0
            for p in every:
                # Whatever the buckets are later, each parameter is padded at most once.
                total += self._padded([p])
            self._memory = SharedMemory(total, self.group, self._device)
        for p in every:
            if p.grad is not None and self._has(p.grad):
                p.grad = p.grad.clone()  # it lies where another one's is going to be
        needed = max(sizes, default=0) // self._world_size * (self._world_size - 1)
        if self._slots is None or self._slots.mine.numel() < needed:
            self._slots = SharedMemory(needed, self.group, self._device)
        self._buckets, begin = [], 0
        for params, size in zip(buckets, sizes, strict=True):
            self._buckets.append(self._bucket(params, begin, size))
            begin += size

    def _has(self, grad: Tensor) -> bool:
        mine = self._memory.mine
        return 0 <= grad.data_ptr() - mine.data_ptr() < mine.numel()

    def _sent_dtype(self, p: Tensor) -> torch.dtype:
        return self._dtype if self._dtype and p.is_floating_point() else p.dtype

    def _room(self, p: Tensor) -> int:
        """Return the elements that a parameter takes in its bucket."""
        return round_up(p.numel(), ALIGN // self._sent_dtype(p).itemsize)

    def _padded(self, params: Sequence[Tensor]) -> int:
        size = 0
        for p in params:
            size += self._room(p) * self._sent_dtype(p).itemsize
        return round_up(size, ALIGN * self._world_size)

    def _bucket(self, params: Sequence[Tensor], begin: int, size: int) -> _Bucket:
        dtype, rank, world = self._sent_dtype(params[0]), self._rank, self._world_size
        flat = self._memory.mine[begin : begin + size].view(dtype)
        rooms = [self._room(p) for p in params]
        places = []
        for room, p in zip(flat[: sum(rooms)].split(rooms), params, strict=True):
            # Strides as the parameter's, as autograd and fused optimizers have them.
            strides = torch.empty_like(p, device="meta").stride()
            places.append(_Place(room.as_strided(p.shape, strides), room))
        length = flat.numel() // world
        slots = self._slots.mine[: (world - 1) * length * dtype.itemsize].view(dtype)

        bucket = _Bucket(places, _part(flat, rank, slots.view(world - 1, length), rooms), [], [])
        if not length:
            return bucket
        for step in range(1, world):
            owner = (rank + step) % world  # each rank begins with another one
            row = rank - (rank > owner)  # of this rank's slot there: the owner itself has none
            slot = self._slots.view(owner, row * length * dtype.itemsize, length, dtype)
            bucket.others.append(_part(flat, owner, slot, rooms))
            mine = begin + rank * length * dtype.itemsize
            bucket.means.append(self._memory.view(owner, mine, length, dtype))
        return bucket

    def send(self, bucket: int, params: Sequence[Tensor], then: Then | None = None) -> bool:
        """Start the mean of the parameters' gradients, which are in the bucket's memory from now on
        unless they travel in another dtype. ``then`` is called with them on the stream where it is
        there; True, since it always is."""
        to = self._buckets[bucket]
        # Flat: what is summed and what is sent of each. Both are read where backward left them if
        # that is as they would lie here, but no other dtype is sent.
        summed, sent, staged = [], [], []
        for place, p in zip(to.places, params, strict=True):
            grad, source = p.grad, place.flat
            if not _is_view(grad, place.view):
                self._held.append(grad)
                if _lies_alike(grad, place):
                    source = grad.as_strided((grad.numel(),), (1,))
                else:
                    staged.append((place.view, grad))
            summed.append(source)
            sent.append(source if source.dtype == place.flat.dtype else place.flat)
            if grad.dtype == place.view.dtype:
                p.grad = place.view
        for part in to.others:
            for piece in part.pieces:
                if sent[piece.index] is not summed[piece.index]:
                    staged.append((piece.here, piece.cut(summed[piece.index])))
        back = []
        for here, grad in staged:
            if here.dtype != grad.dtype:
                back.append((grad, here))
        messages = []
        for part in to.others:
            messages.extend(part.messages(sent))
        sums = to.own.messages(summed)

        @torch.no_grad()
        def work() -> None:
            _copy(staged)
            if to.others:
                for source, slot, _ in messages:
                    slot.copy_(source)
                self._memory.barrier()  # all have what they sum
                for source, slots, mean in sums:
                    mean_of_parts(source, slots, mean, self._rank)
                for mean in to.means:
                    mean.copy_(to.own.here)
                self._memory.barrier()  # all have the means
            _copy(back)
            if then is not None:
                then(params)

        self._under_way = self._lane.run(work)
        return True

    def arrive(self) -> None:
        """Let the current stream wait for all that was sent."""
        self._lane.wait(self._under_way)
        self._under_way = None
        self._held.clear()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy and cast the second of each into the first."""
    if pairs:
        copy_all(*zip(*pairs, strict=True))


def _is_view(grad: Tensor, view: Tensor) -> bool:
    return grad.data_ptr() == view.data_ptr() and grad.dtype == view.dtype


def _lies_alike(grad: Tensor, place: _Place) -> bool:
    """Return whether the gradient fills what its place has, in that order, from an address on that
    a kernel reads as quickly, which then is compiled for no other."""
    filled = grad.numel() == place.flat.numel() and grad.stride() == place.view.stride()
    return filled and grad.data_ptr() % KERNEL_ALIGN == 0


def mean_of_parts(own: Tensor, others: Tensor, mean: Tensor, rank: int) -> None:
    """Write the mean of ``own``, of ``rank``, and of ``others``, a row for each other rank in rank
    order, to ``mean``: added in rank order in float32 (float64 for float64), rounded once.

    ``mean`` may be ``own``. Where ``own`` has another dtype than the others it is rounded to theirs
    first, and overwritten with the mean.
    """
    if own.device.type != "cuda":
        mean_of_parts_plain(own, others, mean, rank)
        return
    from a2lib.parallel.mean_kernel import launch_mean_kernel  # needs triton, as a GPU does

    launch_mean_kernel(own, others, mean, rank)


def mean_of_parts_plain(own: Tensor, others: Tensor, mean: Tensor, rank: int) -> None:
    """Do the same in plain operations, which read and write everything once an addition."""
    wide = torch.float64 if mean.dtype == torch.float64 else torch.float32
    parts = [*others[:rank], own.to(others.dtype), *others[rank:]]
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    # By a tensor: a GPU would multiply by the reciprocal of a number.
    mean.copy_(total / torch.full((), len(parts), dtype=wide, device=own.device))
    if own.dtype != others.dtype:
        own.copy_(mean)

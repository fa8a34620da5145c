"""An all-reduce by copy engines: GPUs of one host write to each other's memory over NVLink or PCIe.

NCCL's kernels occupy multiprocessors that backward could use. Here each rank owns 1/W of each
gradient, and of a bucket of them

1. writes the other parts of its gradients into slots of their owners, from where backward left
   them, which is work of the copy engines;
2. behind a barrier takes the means of its own parts, of its gradients and its slots, by kernels;
3. writes the means to where every rank has its gradients from then on: copy engines again. Behind
   a barrier all of the bucket is there.

The first two are FSDP's reduce-scatter too (``fsdp.transfers``).

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from a2lib.parallel.group import everyone, member
from a2lib.parallel.lane import Lane
from a2lib.parallel.tensors import copy_all, round_up, shares

COMMUNICATIONS = ("backend", "copy_engines", "auto")
# What is called with the parameters of a bucket whose gradients are the means.
Then = Callable[[Sequence[Tensor]], None]
# A rank's part of a gradient, and its slot, begin at a multiple of a line of the cache, in bytes.
ALIGN = 128
# What a kernel reads at once, in bytes.
KERNEL_ALIGN = 16
# A rank that is gone leaves the others' barrier kernels waiting, which NCCL's watchdog does not
# see. Past this they fail; it is NCCL's own limit.
BARRIER_LIMIT_MS = 600_000


def choose(
    communication: str, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[str, str | None]:
    """Return "backend" or "copy_engines", and why "auto" took the backend, None where it did not;
    collective. Raises ValueError for "copy_engines" where they cannot, and for another word."""
    if communication not in COMMUNICATIONS:
        raise ValueError(f"communication must be one of {COMMUNICATIONS}; got {communication!r}")
    if communication == "backend":
        return "backend", None
    reason = why_not(group, device)
    if reason is None:
        return "copy_engines", None
    if communication == "copy_engines":
        raise ValueError(f"copy engines cannot do it here: {reason}; 'backend' or 'auto' can")
    return "backend", reason


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
    reasons, gpus = zip(*everyone((reason, gpu), group), strict=True)
    if any(reasons):
        return _first(reasons)
    if len(set(gpus)) < size:
        return "several ranks have one GPU"
    return _first(everyone(_unreachable(device, gpus), group))


def _first(reasons: Sequence[str | None]) -> str | None:
    return next(filter(None, reasons), None)


def _unreachable(device: torch.device, gpus: Sequence[str]) -> str | None:
    """Return why this rank cannot reach a GPU of those, by their UUIDs, which no other host has."""
    here = {}
    for i in range(torch.cuda.device_count()):
        here[str(torch.cuda.get_device_properties(i).uuid)] = i
    mine = torch.cuda.current_device() if device.index is None else device.index
    for other, gpu in enumerate(gpus):
        if gpu not in here:
            return f"rank {other}'s GPU is not visible to every rank; they need one host"
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

    def others(self) -> list[int]:
        """Return the other ranks, from the next one on: each begins with another one."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def barrier(self) -> None:
        """Let the current stream wait for that of every rank, and so for what these had queued."""
        self._handle.barrier(channel=0, timeout_ms=BARRIER_LIMIT_MS)


@dataclass(frozen=True)
class Layout:
    """Where the parts lie whose means are taken; each list has a number for each tensor, in
    elements."""

    counts: list[int]  # how many are in a part
    own_at: list[int]  # where this rank's part begins in the tensor
    received_at: list[int]  # where the others' parts begin in what is received
    rows: list[int]  # how far one rank's part is behind another's there
    means_at: list[int]  # where the mean goes


def _part(x: Tensor, begin: int, count: int) -> Tensor:
    """Return so many elements of a tensor as they lie in memory, flat."""
    return x.as_strided((count,), (1,), x.storage_offset() + begin)


def slot_bytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of one slot of a tensor, of which each rank has so many elements."""
    return round_up(max(sizes) * dtype.itemsize, ALIGN)


class Slots:
    """Slots in each rank's memory for what the others send it of some tensors of one dtype.

    ``sizes`` has of each tensor how many elements each rank owns, as they lie in memory, and
    ``means_at`` where this rank's part of its mean begins in a tensor that holds all means. A
    tensor has a slot for each other rank, in rank order.
    """

    def __init__(
        self,
        shared: SharedMemory,
        sizes: Sequence[Sequence[int]],
        means_at: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._shared = shared
        rank, others = shared.rank, shared.others()
        layout = Layout([], [], [], [], list(means_at))
        begins, rows, end = [], [], 0  # of each tensor's slots, in bytes
        for of_ranks in sizes:
            row = slot_bytes(of_ranks, dtype)
            layout.counts.append(of_ranks[rank])
            layout.own_at.append(sum(of_ranks[:rank]))
            layout.received_at.append(end // dtype.itemsize)
            layout.rows.append(row // dtype.itemsize)
            begins.append(end)
            rows.append(row)
            end += row * len(others)
        # A tensor, where its owner's part begins, and this rank's slot there; those of the next
        # rank first: not all to one.
        self._sends: list[tuple[int, int, Tensor]] = []
        for owner in others:
            row_there = rank if rank < owner else rank - 1  # the owner itself has none
            for i, of_ranks in enumerate(sizes):
                if of_ranks[owner]:
                    begin = begins[i] + row_there * rows[i]
                    slot = shared.view(owner, begin, of_ranks[owner], dtype)
                    self._sends.append((i, sum(of_ranks[:owner]), slot))
        self._received = shared.view(rank, 0, end // dtype.itemsize, dtype)
        from a2lib.parallel.mean_kernel import MeanKernel  # needs triton, as a GPU does

        self._mean = MeanKernel(layout, rank, shared.world_size, self._received.device)

    def reduce_scatter(self, tensors: Sequence[Tensor], means: Tensor) -> None:
        """Fill ``means`` with the means over the ranks of what this one owns of the tensors, which
        leave no gaps in memory. Nobody reads the slots when it begins."""
        for i, begin, slot in self._sends:
            slot.copy_(_part(tensors[i], begin, slot.numel()))
        self._shared.barrier()  # all have what they sum
        self._mean(tensors, self._received, means)


@dataclass
class _Place:
    """Where a parameter's gradient is in the memory of the ranks; each rank owns a part of it."""

    view: Tensor  # the gradient in this rank's memory
    sizes: list[int]  # elements that each rank owns
    own: Tensor  # this rank's part
    own_at: int  # where that begins in the memory, in elements
    theirs: list[Tensor]  # where each other rank has it

    def __post_init__(self) -> None:
        # Asked of a tensor at each step these would cost the host more.
        self.address, self.dtype = self.view.data_ptr(), self.view.dtype
        self.stride = self.view.stride()

    def is_like(self, grad: Tensor) -> bool:
        """Return whether the gradient lies as it would here, from an address on that a kernel reads
        as quickly, which then is compiled for no other."""
        alike = grad.dtype == self.dtype and grad.stride() == self.stride
        return alike and grad.data_ptr() % KERNEL_ALIGN == 0


class CopyEngines:
    """Means of buckets of gradients over the ranks of ``group``, in ``dtype``, None their own."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.group, self._device, self._dtype = group, device, dtype
        self._lane = Lane(device)
        self._memory: SharedMemory | None = None
        self._places: dict[Tensor, _Place] = {}
        self._slots: SharedMemory | None = None
        self._under_way: torch.cuda.Event | None = None  # where the lane is through with all of it
        # The gradients that the lane reads. Their memory, of backward's stream, would else be that
        # of a later kernel there before it has read them.
        self._held: list[Tensor] = []

    def lay_out(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Give each parameter its memory, the first time, and each bucket its slots. Nothing is
        under way."""
        if self._memory is None:
            self._take_memory(list(itertools.chain(*buckets)))
        rows = self._memory.world_size - 1
        needed = 0
        for params in buckets:
            size = 0
            for p in params:
                size += slot_bytes(self._places[p].sizes, self._sent_dtype(p)) * rows
            needed = max(needed, size)
        if self._slots is None or self._slots.mine.numel() < needed:
            self._slots = SharedMemory(needed, self.group, self._device)
        self._buckets: list[tuple[Slots, Tensor]] = []  # with this rank's memory of its dtype
        for params in buckets:
            dtype, sizes, owned_at = self._sent_dtype(params[0]), [], []
            for p in params:
                sizes.append(self._places[p].sizes)
                owned_at.append(self._places[p].own_at)
            count = self._memory.mine.nbytes // dtype.itemsize
            memory = self._memory.view(self._memory.rank, 0, count, dtype)
            self._buckets.append((Slots(self._slots, sizes, owned_at, dtype), memory))

    def _sent_dtype(self, p: Tensor) -> torch.dtype:
        return self._dtype if self._dtype and p.is_floating_point() else p.dtype

    def _take_memory(self, params: Sequence[Tensor]) -> None:
        begins, end = [], 0
        for p in params:
            begins.append(end)
            end += round_up(p.numel() * self._sent_dtype(p).itemsize, ALIGN)
        self._memory = SharedMemory(end, self.group, self._device)
        for p, begin in zip(params, begins, strict=True):
            self._places[p] = self._place(p, begin)

    def _place(self, p: Tensor, begin: int) -> _Place:
        memory, dtype, count = self._memory, self._sent_dtype(p), p.numel()
        flat = memory.view(memory.rank, begin, count, dtype)
        # Strides as the parameter's, as autograd and fused optimizers have them.
        view = flat.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
        most = round_up(-(-count // memory.world_size), ALIGN // dtype.itemsize)
        sizes = shares(count, most, memory.world_size)
        start, size = min(memory.rank * most, count), sizes[memory.rank]
        theirs = []
        for other in memory.others():
            theirs.append(memory.view(other, begin + start * dtype.itemsize, size, dtype))
        own_at = begin // dtype.itemsize + start
        return _Place(view, sizes, flat[start : start + size], own_at, theirs)

    def send(self, bucket: int, params: Sequence[Tensor], then: Then | None = None) -> None:
        """Start the mean of the parameters' gradients, which are in the bucket's memory from now on
        unless they travel in another dtype. ``then`` is called with them on the stream where it is
        there."""
        slots, memory = self._buckets[bucket]
        places = list(map(self._places.get, params))
        # What is sent and summed is read where backward left it if it lies there as it would here.
        sent, staged, back = [], [], []
        for place, p in zip(places, params, strict=True):
            grad, source = p.grad, place.view
            is_here = grad.data_ptr() == place.address and grad.dtype == place.dtype
            if not is_here:
                self._held.append(grad)
                if place.is_like(grad):
                    source = grad
                else:
                    staged.append((place.view, grad))
            sent.append(source)
            if grad.dtype == place.dtype:
                p.grad = place.view
            else:
                back.append((grad, place.view))

        def work() -> None:
            _copy(staged)
            slots.reduce_scatter(sent, memory)
            for step in range(self._memory.world_size - 1):
                for place in places:
                    if place.own.numel():
                        place.theirs[step].copy_(place.own)
            self._memory.barrier()  # all have the means
            _copy(back)
            if then is not None:
                then(params)

        self._under_way = self._lane.run(work)

    def arrive(self) -> None:
        """Let the current stream wait for all that was sent."""
        self._lane.wait(self._under_way)
        self._under_way = None
        self._held.clear()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy and cast the second of each into the first."""
    if pairs:
        copy_all(*zip(*pairs, strict=True))

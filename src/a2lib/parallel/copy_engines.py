"""An all-reduce by copy engines: GPUs of one host read each other's memory over NVLink or PCIe.

NCCL's kernels occupy multiprocessors that backward could use. Here each rank owns 1/W of a bucket:
it copies that part of every other rank's gradients to itself, which the copy engines do, takes the
mean in one short kernel, and copies the other parts, done by their owners, from them. Barriers
between, small kernels too, are PyTorch's symmetric memory's; without multicast.

All of it is on one stream beside backward's, the copy of the gradients to where others can read
them too: backward goes on, and what it made is held until the finish.

The sum is in rank order and in float32 (float64 for float64), rounded once: with two ranks NCCL's
bits, with more those of one process that adds in that order.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from a2lib.parallel.group import member
from a2lib.parallel.lane import Lane

# What is called with the parameters of a bucket whose gradients are the means.
Then = Callable[[Sequence[Tensor]], None]
# Every rank's part of a bucket begins at a multiple of so many bytes.
ALIGN = 128
BLOCK = 4096
# A rank that is gone leaves the others' barrier kernels waiting, which NCCL's watchdog does not
# see. Past this they fail; it is NCCL's own limit.
BARRIER_LIMIT_MS = 600_000


def why_not(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Why copy engines cannot serve these ranks, None where they can; collective, and the same
    answer on every rank."""
    rank, size = member(group)
    mine = {"host": _host(), "gpu": None, "reason": None}
    if device.type != "cuda":
        mine["reason"] = f"the parameters are on {device.type}, not on GPUs"
    elif size < 2:
        mine["reason"] = "there is one rank"
    else:
        mine["gpu"] = str(torch.cuda.get_device_properties(device).uuid)
    all_of = _gather(mine, group, size)
    reasons = [one["reason"] for one in all_of if one["reason"]]
    if not reasons and len({one["host"] for one in all_of}) > 1:
        reasons = ["the ranks are on several hosts"]
    if not reasons and len({one["gpu"] for one in all_of}) < size:
        reasons = ["several ranks have one GPU"]
    if reasons:
        return reasons[0]
    reasons = _gather(_unreachable(device, [one["gpu"] for one in all_of]), group, size)
    return next((reason for reason in reasons if reason), None)


def _gather(mine: object, group: dist.ProcessGroup | None, size: int) -> list:
    gathered = [None] * size
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def _unreachable(device: torch.device, gpus: Sequence[str]) -> str | None:
    here = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
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
    """(this rank's ``size`` bytes; the handle with ``get_buffer(rank, ...)`` of every rank's, and
    ``barrier``). Collective; the memory stays until the process ends."""
    import torch.distributed._symmetric_memory as symmetric_memory

    whole, aside = group or dist.group.WORLD, []
    while True:
        mine = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        key = whole.group_name, mine.data_ptr()
        told = _gather((mine.data_ptr(), _met.get(key)), group, whole.size())
        each = [address for address, _ in told]
        if all(met is None for _, met in told) or all(met == each for _, met in told):
            break
        aside.append(mine)  # held, so that the next one is another
    _met[key] = each
    return mine, symmetric_memory.rendezvous(mine, whole)


@dataclass
class _Bucket:
    views: list[Tensor]  # of this rank's memory, one a parameter
    parts: list[Tensor]  # of this rank's memory, one a rank
    others: list[tuple[int, Tensor, Tensor]]  # of each other: its rank, what it has of my part, its
    scratch: list[Tensor]  # where the others' copies of my part go, one a rank but this one


class CopyEngines:
    """Means of buckets of gradients over the ranks of ``group``, in ``dtype``, None their own."""

    name = "copy_engines"

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.group, self._device, self._dtype = group, device, dtype
        self._rank, self._world_size = member(group)
        self._lane = Lane(device)
        self._memory: Tensor | None = None
        self._under_way: torch.cuda.Event | None = None  # where the lane is through with all of it
        # The gradients that the lane reads. Their memory, of backward's stream, would else be that
        # of a later kernel there before it has read them.
        self._held: list[Tensor] = []

    def lay_out(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        """Give each bucket of parameters its memory, the first time by taking it. Gradients that
        are there move out of it."""
        sizes = [self._padded(params) for params in buckets]
        if self._memory is None:
            # Whatever the buckets are later, each parameter is padded at most once.
            total = sum(self._padded([p]) for params in buckets for p in params)
            self._memory, self._handle = shared_memory(max(total, ALIGN), self.group, self._device)
            # Where this allocation begins in what the handle counts from.
            first = self._handle.get_buffer(self._rank, (1,), torch.uint8)
            self._shift = self._memory.data_ptr() - first.data_ptr()
        for p in (p for params in buckets for p in params):
            if p.grad is not None and self._has(p.grad):
                p.grad = p.grad.clone()  # it lies where another one's is going to be
        largest = max(sizes, default=0) // self._world_size
        scratch = torch.empty(
            (self._world_size - 1) * largest, dtype=torch.uint8, device=self._device
        )
        self._buckets, begin = [], 0
        for params, size in zip(buckets, sizes, strict=True):
            self._buckets.append(self._bucket(params, begin, size, scratch))
            begin += size

    def _has(self, grad: Tensor) -> bool:
        return 0 <= grad.data_ptr() - self._memory.data_ptr() < self._memory.numel()

    def _sent_dtype(self, p: Tensor) -> torch.dtype:
        return self._dtype if self._dtype and p.is_floating_point() else p.dtype

    def _padded(self, params: Sequence[Tensor]) -> int:
        size = sum(p.numel() * self._sent_dtype(p).itemsize for p in params)
        unit = ALIGN * self._world_size
        return -(-size // unit) * unit

    def _bucket(self, params: Sequence[Tensor], begin: int, size: int, scratch: Tensor) -> _Bucket:
        dtype, world = self._sent_dtype(params[0]), self._world_size
        flat = self._memory[begin : begin + size].view(dtype)
        used = flat[: sum(p.numel() for p in params)].split([p.numel() for p in params])
        # Strides as the parameter's, as autograd and fused optimizers have them.
        views = [
            piece.as_strided(p.shape, torch.empty_like(p, device="meta").stride())
            for piece, p in zip(used, params, strict=True)
        ]
        part = flat.numel() // world

        start = (self._shift + begin) // dtype.itemsize

        def of(rank: int, which: int) -> Tensor:
            return self._handle.get_buffer(rank, (part,), dtype, start + which * part)

        others = [(self._rank + step) % world for step in range(1, world)]
        return _Bucket(
            views,
            list(flat.split(part)) if part else [flat] * world,
            [(r, of(r, self._rank), of(r, r)) for r in others] if part else [],
            list(scratch.view(dtype)[: (world - 1) * part].view(world - 1, part)),
        )

    def send(self, bucket: int, params: Sequence[Tensor], then: Then | None = None) -> bool:
        """Start to copy the parameters' gradients into the bucket's memory, where they are from now
        on unless they travel in another dtype, and the mean. ``then`` is called with them on the
        stream where it is there; True, since it always is."""
        to = self._buckets[bucket]
        pairs = zip(to.views, params, strict=True)
        fresh = [(v, p.grad) for v, p in pairs if not _is_view(p.grad, v)]
        self._held += [grad for _, grad in fresh]
        for v, p in zip(to.views, params, strict=True):
            if v.dtype == p.grad.dtype:
                p.grad = v

        def work() -> None:
            _copy_in(fresh)
            self._mean(to)
            back = [(grad, v) for v, grad in fresh if v.dtype != grad.dtype]
            if back:
                torch._foreach_copy_([grad for grad, _ in back], [v for _, v in back])
            if then is not None:
                then(params)

        self._under_way = self._lane.run(work)
        return True

    @torch.no_grad()
    def _mean(self, bucket: _Bucket) -> None:
        if not bucket.others:
            return
        self._barrier()  # all have copied their gradients in
        for rank, mine_there, _ in bucket.others:
            bucket.scratch[rank - (rank > self._rank)].copy_(mine_there)
        mean_of_parts(bucket.parts[self._rank], bucket.scratch, self._rank)
        self._barrier()  # all have their own part
        for rank, _, done in bucket.others:
            bucket.parts[rank].copy_(done)

    def _barrier(self) -> None:
        self._handle.barrier(channel=0, timeout_ms=BARRIER_LIMIT_MS)

    def arrive(self) -> None:
        """Let the current stream wait for all that was sent, and until no rank reads this one's
        memory any more; collective."""
        if any(bucket.others for bucket in self._buckets):
            self._under_way = self._lane.run(self._barrier)
        self._lane.wait(self._under_way)
        self._under_way = None
        self._held.clear()


def _copy_in(fresh: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each gradient into its view: what lies there as it does here by a call of its own, which
    is no kernel of PyTorch's, the rest in one kernel."""
    rest = []
    for v, grad in fresh:
        if v.dtype == grad.dtype and v.stride() == grad.stride():
            v.copy_(grad)
        else:
            rest.append((v, grad))
    if rest:
        torch._foreach_copy_([v for v, _ in rest], [grad for _, grad in rest])


def _is_view(grad: Tensor, view: Tensor) -> bool:
    return grad.data_ptr() == view.data_ptr() and grad.dtype == view.dtype


def mean_of_parts(own: Tensor, others: Sequence[Tensor], rank: int) -> None:
    """Overwrite ``own``, of ``rank``, with the mean over all, added in rank order in float32 and
    rounded once; ``others`` are the other ranks', in rank order, side by side in memory."""
    world, n = len(others) + 1, own.numel()
    if own.device.type != "cuda":
        mean_of_parts_plain(own, others, rank)
        return
    wide = tl.float64 if own.dtype == torch.float64 else tl.float32
    _mean_kernel[(triton.cdiv(n, BLOCK),)](
        own, others[0], n, RANK=rank, WORLD=world, WIDE=wide, BLOCK=BLOCK
    )


def mean_of_parts_plain(own: Tensor, others: Sequence[Tensor], rank: int) -> None:
    """The same in plain operations, which read and write everything once an addition."""
    wide = torch.float64 if own.dtype == torch.float64 else torch.float32
    parts = [*others[:rank], own, *others[rank:]]
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    # By a tensor: a GPU would multiply by the reciprocal of a number.
    own.copy_(total / torch.full((), len(parts), dtype=wide, device=own.device))


@triton.jit
def _mean_kernel(
    own_ptr,
    others_ptr,
    n,
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
            part = tl.load(others_ptr + tl.cast(r, tl.int64) * n + at, mask=inside, other=0.0)
        else:
            part = tl.load(others_ptr + tl.cast(r - 1, tl.int64) * n + at, mask=inside, other=0.0)
        total += tl.cast(part, WIDE)
    # Not a product with 1 / WORLD, nor an approximate quotient: the plain twin's bits.
    mean = tl.div_rn(total, WORLD * 1.0) if WIDE == tl.float32 else total / WORLD
    tl.store(own_ptr + at, tl.cast(mean, own_ptr.dtype.element_ty), mask=inside)

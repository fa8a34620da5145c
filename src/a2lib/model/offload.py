"""Keep, recompute or send to the host what each block saves for its backward, by a plan.

    plans = choose(always, results, blocks, room, ...)     # a2lib.theory.memory.keeping
    run = PlannedBlocks(plans, Mover(device))
    model.use_checkpointing(run)

A tensor that autograd saves goes to memory of the host's own while later ones are computed, and
comes back while the block behind it goes backward: a lane for each way, beside the stream that
computes. The device's memory is taken and given back on that stream alone, which waits before a
tensor that is on its way is given up, so that no block of memory is used too early. The memory on
the host is page-locked, and the same in every step: a place for each tensor of each block.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from a2lib.activations import BlockPlan
from a2lib.model.checkpointing import keeping
from a2lib.parallel.lane import Lane

# Smaller ones stay: each transfer costs the host some microseconds.
LEAST = 2**20
# What may be on its way to the host before the stream that computes waits.
IN_FLIGHT = 2**30


class PlannedBlocks:
    """Run each block as its plan says: a strategy of ``a2lib.model.checkpointing``.

    Arguments:

    - ``plans``: a ``BlockPlan`` for each block;
    - ``mover``: needed where a plan sends something to the host.

    Raises:

    - ValueError: another number of blocks than of plans, or a plan that sends without a mover;
    - RuntimeError: a plan sends, and there is nothing to be sent, as in a block that is not
      compiled: PyTorch's own checkpoints show what they keep to nobody.
    """

    def __init__(self, plans: Sequence[BlockPlan], mover: Mover | None = None) -> None:
        if mover is None and any(plan.moved for plan in plans):
            raise ValueError("a plan sends tensors to the host, and there is no mover")
        self.plans, self._mover = list(plans), mover

    def __call__(self, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        if len(blocks) != len(self.plans):
            raise ValueError(f"{len(self.plans)} plans for {len(blocks)} blocks")
        moves = self._mover is not None and torch.is_grad_enabled()
        if moves:
            self._mover.begin()
        for i, (block, plan) in enumerate(zip(blocks, self.plans, strict=True)):
            moving = self._mover.moving(i, block, plan.moved) if moves else contextlib.nullcontext()
            with moving:
                x = block(x, each=keeping(plan.kept))
        if moves:
            self._mover.settle()
        return x


@dataclass(eq=False)
class _Kept:
    """A saved tensor that stays where it is."""

    group: object
    forward: int
    tensor: Tensor


@dataclass(eq=False)
class _Moved:
    """A saved tensor that is on the host, or on its way there or back, as bytes."""

    group: object
    forward: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    host: Tensor
    back: Tensor | None = None
    used: bool = False


class Mover:
    """Send saved tensors of ``device`` to the host and bring them back; on the CPU, copy them.

    ``least`` is the size from which on a tensor is sent, ``in_flight`` how much may be on its way,
    both in bytes. The attribute ``moved_bytes`` counts what this forward has sent.
    """

    def __init__(
        self, device: torch.device | str, least: int = LEAST, in_flight: int = IN_FLIGHT
    ) -> None:
        self.device = torch.device(device)
        self.least, self.in_flight = least, in_flight
        self._out, self._back = Lane(self.device), Lane(self.device)
        self._places: dict[tuple[object, int], Tensor] = {}
        # What is on its way: the tensor, and where its copy ends.
        self._sent: collections.deque[tuple[Tensor, torch.cuda.Event | None]] = collections.deque()
        self._forward = self._sent_bytes = 0
        self.begin()

    def begin(self) -> None:
        """Begin a forward. What an earlier one has sent, and no backward has used, is gone."""
        self.settle()
        self._forward += 1
        self.moved_bytes = 0
        self._groups: dict[object, list[_Moved]] = {}
        self._arrived: dict[object, torch.cuda.Event | None] = {}

    def settle(self, allowed: int = 0) -> None:
        """Give up tensors that were sent, until no more bytes than ``allowed`` are on their way."""
        while self._sent and self._sent_bytes > allowed:
            tensor, end = self._sent.popleft()
            self._out.wait(end)
            self._sent_bytes -= tensor.nbytes

    @contextlib.contextmanager
    def moving(self, group: object, module: nn.Module, quota: int) -> Iterator[None]:
        """Send the first tensors that are saved within it for backward, up to ``quota`` bytes.

        Parameters and buffers of ``module``, small tensors and those that are not dense stay.
        ``group`` names what comes back together. When the backward of one begins, by its first
        saved tensor, the one before it starts.

        Raises RuntimeError where there is a quota and nothing is sent, in a second backward, and in
        a backward after another forward.
        """
        own: set[int] = set()
        begun = self.moved_bytes
        self._groups[group] = []

        def pack(x: Tensor) -> _Moved | _Kept:
            if not own:  # not before: a wrapper may gather them with the call
                for p in (*module.parameters(), *module.buffers()):
                    own.add(p.untyped_storage().data_ptr())
            fits = self.least <= x.nbytes <= quota - (self.moved_bytes - begun)
            if fits and x.untyped_storage().data_ptr() not in own and _dense(x):
                return self._send(group, x)
            return _Kept(group, self._forward, x.detach())

        with saved_tensors_hooks(pack, self._unpack):
            yield
        if quota and self.moved_bytes == begun:
            raise RuntimeError(
                f"nothing of {group!r} was sent to the host, where {quota} bytes were to be: "
                "compile the block (block.compile()), and let it have tensors that are not larger"
            )

    def _send(self, group: object, x: Tensor) -> _Moved:
        sent_of_group = self._groups[group]
        key = group, len(sent_of_group)
        if key not in self._places or self._places[key].nbytes != x.nbytes:
            pinned = self.device.type == "cuda"
            self._places[key] = torch.empty(
                x.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned
            )
        host, flat = self._places[key], _bytes_of(x.detach())
        self.settle(max(0, self.in_flight - x.nbytes))
        end = self._out.run(lambda: host.copy_(flat, non_blocking=True))
        self._sent.append((flat, end))
        self._sent_bytes += x.nbytes
        self.moved_bytes += x.nbytes
        moved = _Moved(group, self._forward, x.size(), x.stride(), x.dtype, host)
        sent_of_group.append(moved)
        return moved

    def _unpack(self, x: _Moved | _Kept) -> Tensor:
        if isinstance(x, _Moved) and (x.used or x.forward != self._forward):
            why = "was used by a backward" if x.used else "is another forward's by now"
            raise RuntimeError(f"what {x.group!r} sent to the host {why}; call backward once")
        if x.forward == self._forward:
            groups = list(self._groups)
            # The one before, too: queued in front of this one's kernels, it travels beside them.
            before = groups[: groups.index(x.group)][-1:]
            for group in (x.group, *before):
                if group not in self._arrived:
                    self._fetch(group)
        if isinstance(x, _Kept):
            return x.tensor
        self._back.wait(self._arrived[x.group])
        tensor, x.back, x.used = x.back, None, True
        return tensor.view(x.dtype).as_strided(x.size, x.stride)

    def _fetch(self, group: object) -> None:
        self.settle()
        waiting = self._groups[group]
        for x in waiting:
            x.back = torch.empty_like(x.host, device=self.device, pin_memory=False)

        def copy() -> None:
            for x in waiting:
                x.back.copy_(x.host, non_blocking=True)

        self._arrived[group] = self._back.run(copy)


def _dense(x: Tensor) -> bool:
    """Return whether x's elements fill a piece of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return x.numel() > 0 and x.layout == torch.strided


def _bytes_of(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)

"""One parameter under FSDP: what the optimizer holds, and what the module shows while it computes.

The master is the parameter object the module had, so an optimizer or a name that knew it still
does. Of a parameter of two or more dimensions it becomes this rank's rows of dim 0, of others it
stays whole. It is float32 if it was of 16 bits.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from a2lib.parallel.group import all_gather_single
from a2lib.parallel.tensors import shares

Place = tuple[nn.Module, str]


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(eq=False)
class Replicated:
    """A parameter that every rank holds whole. ``shown`` is what the module computes with: the
    master, or a cast copy of it."""

    names: list[str]
    master: nn.Parameter
    shown_dtype: torch.dtype
    places: list[Place]
    shown: nn.Parameter = field(init=False)

    def __post_init__(self) -> None:
        self.shown = self.master
        self.master.data = self.master.data.to(master_dtype(self.master.dtype))
        if self.shown_dtype != self.master.dtype:
            copy = self.master.detach().to(self.shown_dtype)
            self.shown = nn.Parameter(copy, requires_grad=self.master.requires_grad)

    def whole(self, group: dist.ProcessGroup | None) -> Tensor:
        """Return a copy of the master."""
        return self.master.detach().clone()

    @torch.no_grad()
    def take_gradient(self) -> None:
        """Add the copy's gradient to the master's."""
        if self.shown is self.master or self.shown.grad is None:
            return
        gradient, self.shown.grad = self.shown.grad.to(self.master.dtype), None
        add_gradient(self.master, gradient)

    def has_gradient(self) -> bool:
        """Return whether this rank has one since the last finish."""
        return self.master.grad is not None

    def fill_gradient(self) -> None:
        """Have zeros where there is none, and a contiguous one, as NCCL wants it."""
        if self.master.grad is None:
            self.master.grad = torch.zeros_like(self.master)
        elif not self.master.grad.is_contiguous():
            self.master.grad = self.master.grad.contiguous()

    def settle(self, unused: bool) -> None:
        """End the finish; ``unused`` where no rank had a gradient."""
        if unused:
            self.master.grad = None


@dataclass(eq=False)
class Sharded:
    """A parameter of which each rank holds ceil(rows / W) rows, the last ranks fewer or none.

    ``shown`` is the whole, in ``shown_dtype``, in a buffer padded to W equal slots of rows, which
    its unit gives it and takes the memory of.
    """

    names: list[str]
    master: nn.Parameter
    shown_dtype: torch.dtype
    places: list[Place]
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        whole = self.master.detach().contiguous()
        self.shape = whole.shape
        self.rows = -(-self.shape[0] // self.world_size)  # of a rank's slot, padding included
        self.slot = self.rows * self.shape[1:].numel()
        start = min(self.rank * self.rows, self.shape[0])  # a rank past the end has no rows
        rows = whole[start : start + self.rows].clone()
        self.master.data = rows.to(master_dtype(whole.dtype))
        self.master._is_shard = True  # DDP and ShardedOptimizer refuse it
        self.shape_of_slot = torch.Size([self.rows, *self.shape[1:]])
        self.padded_shape = torch.Size([self.world_size * self.rows, *self.shape[1:]])
        self._is_shorter = len(self.master) < self.rows  # than its slot
        self._present = False  # a gradient was here since the last finish
        self._from_nothing = False  # the master's gradient began as what was reduced since then

    def whole(self, group: dist.ProcessGroup | None) -> Tensor:
        """Return the whole master; collective."""
        rows = self.master.detach()
        padded = rows.new_zeros(self.slot)
        padded[: rows.numel()].copy_(rows.reshape(-1))
        buffer = rows.new_empty(self.size)
        # As bytes: not every backend sends every dtype.
        all_gather_single(buffer.view(torch.uint8), padded.view(torch.uint8), group=group)
        return buffer[: self.shape.numel()].view(self.shape).clone()

    @property
    def size(self) -> int:
        """Return the elements of the whole, padding included."""
        return self.world_size * self.slot

    def lie_in(self, buffer: Tensor) -> None:
        """Have the whole in ``buffer``, of ``size`` elements."""
        self.buffer = buffer
        self.shown = nn.Parameter(
            buffer[: self.shape.numel()].view(self.shape), requires_grad=self.master.requires_grad
        )

    def slot_of(self, rank: int) -> Tensor:
        """Return a rank's slot of the whole, flat."""
        # By data, which counts no change: who writes here writes the same values as before.
        return self.buffer.data[rank * self.slot :][: self.slot]

    def shares(self) -> list[int]:
        """Return how many elements of the whole, flat and not padded, each rank has."""
        return shares(self.shape.numel(), self.slot, self.world_size)

    def take_whole_gradient(self) -> Tensor:
        """Return the gradient of the whole, contiguous, and drop it here; none counts as zero."""
        gradient = self.shown.grad
        if gradient is None:
            return torch.zeros(self.shape, dtype=self.shown_dtype, device=self.master.device)
        self.shown.grad = None
        self._present = True
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        return gradient.contiguous()

    def take_reduced(self, room: Tensor) -> None:
        """Add the mean's rows of this rank to the master's gradient."""
        if self._is_shorter:
            room = room[: len(self.master)]
        self._from_nothing |= add_gradient(self.master, room)

    def has_gradient(self) -> bool:
        """Return whether this rank has one since the last finish, before it was reduced."""
        return self._present

    def settle(self, unused: bool) -> None:
        """End the finish; ``unused`` where no rank had a gradient: then there is none."""
        if unused and self._from_nothing:
            self.master.grad = None
        self._present = self._from_nothing = False


def add_gradient(master: nn.Parameter, gradient: Tensor) -> bool:
    """Add to the master's gradient; return whether it had none."""
    if master.grad is None:
        master.grad = gradient
        return True
    master.grad += gradient
    return False

"""What every class of this package asks of its process group."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

# torch 2.13 names these two anew, and warns of the old names, which 2.11 has alone.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Tensors of one dtype in one call of the backend, but for Mean on the current stream. The group's
# own methods: PyTorch's functions, and its context manager, cost the host more than the call.


def all_gather_coalesced(
    wholes: list[Tensor], parts: list[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Fill each whole with the ranks' parts, in rank order; a part may be its own slot there."""
    group = group or dist.group.WORLD
    options = AllgatherOptions()
    options.asyncOp = False
    gather = getattr(group, "all_gather_single_coalesced", None)
    gather = gather or group.allgather_into_tensor_coalesced
    _done(gather(_real(wholes), _real(parts), options))


def reduce_scatter_coalesced(
    parts: list[Tensor], wholes: list[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Fill each part with this rank's slot of the mean of the ranks' wholes."""
    group = group or dist.group.WORLD
    options = ReduceScatterOptions()
    options.asyncOp, options.reduceOp = False, mean_operator(wholes, group)
    scatter = getattr(group, "reduce_scatter_single_coalesced", None)
    scatter = scatter or group.reduce_scatter_tensor_coalesced
    _done(scatter(_real(parts), _real(wholes), options))


def mean_coalesced(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Make each tensor the mean of the ranks' own."""
    group = group or dist.group.WORLD
    options = AllreduceCoalescedOptions()
    options.asyncOp, options.reduceOp = False, mean_operator(tensors, group)
    _done(group.allreduce_coalesced(_real(tensors), options))


class Mean:
    """Makes each of a call's tensors the mean of the ranks' own, on the backend's own stream behind
    what the current one has queued; the call returns what to wait for."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        member(group)
        self._group = group or dist.group.WORLD
        self._one, self._several = AllreduceOptions(), AllreduceCoalescedOptions()
        self._one.asyncOp = self._several.asyncOp = True

    def __call__(self, tensors: list[Tensor]) -> dist.Work:
        operator = mean_operator(tensors, self._group)
        self._one.reduceOp = self._several.reduceOp = operator
        if len(tensors) == 1:
            return self._group.allreduce(_real(tensors), self._one)
        return self._group.allreduce_coalesced(_real(tensors), self._several)


def _real(tensors: list[Tensor]) -> list[Tensor]:
    """Views of complex ones as pairs, since backends know no complex numbers."""
    return [torch.view_as_real(x) if x.is_complex() else x for x in tensors]


def _done(work: dist.Work | None) -> None:
    if work is not None:  # where the backend has not waited by itself
        work.wait()


def member(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank, size) of this process in ``group``, None for the default one.

    Raises RuntimeError where there is no process group, or this process is not in this one.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: start the processes with torchrun, and call "
            "torch.distributed.init_process_group in each"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise RuntimeError("this process is not in the group it was given; only its members may be")
    return rank, dist.get_world_size(group)


def everyone(value: object, group: dist.ProcessGroup | None = None) -> list:
    """The values of all ranks, in rank order; collective."""
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_alike(what: str, lines: Sequence[str], group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on every rank unless all gave the same ``lines``; collective.

    The processes would pair other tensors than they mean: wrong sums, or a hang.
    """
    rank, _ = member(group)
    gathered = everyone(list(lines), group)
    for other, theirs in enumerate(gathered):
        if theirs == gathered[0]:
            continue
        here, there = next(
            (a, b) for a, b in zip([*gathered[0], None], [*theirs, None], strict=False) if a != b
        )
        raise ValueError(
            f"{what} must be the same on every rank: rank 0 has {here or 'no more'}, "
            f"rank {other} {there or 'no more'}"
        )


def make_alike(module: nn.Module, group: dist.ProcessGroup | None) -> torch.device:
    """Give the module's parameters and buffers the values of the group's rank 0; their device.
    Collective. Raises ValueError where ranks differ in more, for shards of FSDP, and as
    ``one_device``."""
    device = one_device(module)
    if any(map(is_shard, module.parameters())):
        raise ValueError("a parameter is a shard of FSDP, another on each rank; FSDP averages it")
    check_alike("parameters", describe(module.named_parameters()), group)
    check_alike("buffers", describe(module.named_buffers()), group)
    broadcast_from_first([*module.parameters(), *module.buffers()], group)
    return device


def is_shard(parameter: Tensor) -> bool:
    """Whether it is of an FSDP, ours or PyTorch's: other ranks have other rows of it."""
    # DTensor's module takes a process more than a second to import.
    return hasattr(parameter, "device_mesh") or getattr(parameter, "_is_shard", False)


def describe(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Name, shape, dtype and whether trained, one line a tensor."""
    return [
        f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        + (" trained" if x.requires_grad else "")
        for name, x in named
    ]


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite each tensor with that of the group's rank 0, to the bit, whatever its dtype."""
    for tensor in tensors:
        if not tensor.numel():
            continue
        dense = tensor.detach().contiguous()
        dist.broadcast(dense.reshape(-1).view(torch.uint8), group=group, group_src=0)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)


def one_device(module: nn.Module) -> torch.device:
    """The device of every parameter and buffer; raises ValueError where there are several, or
    "meta"."""
    devices = {x.device for x in (*module.parameters(), *module.buffers())}
    if len(devices) > 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"parameters and buffers must be on one device and not meta; got {names}")
    return devices.pop() if devices else torch.device("cpu")


def sum_or_mean(size: int) -> dist.ReduceOp.RedOpType:
    """The operator of a mean over ``size`` ranks. A sum for one: a mean of one has come out wrong
    in NCCL's reduce-scatter."""
    return dist.ReduceOp.AVG if size > 1 else dist.ReduceOp.SUM


def mean_operator(tensors: list[Tensor], group: dist.ProcessGroup) -> dist.ReduceOp.RedOpType:
    """Return the operator that makes each of `tensors`, all of one dtype, the mean of the ranks'.

    gloo adds before it divides, and a sum of float16 may be infinite where the mean is not. Those
    are divided here, in place, and the operator is a sum.
    """
    if tensors[0].dtype == torch.float16 and dist.get_backend(group) == "gloo":
        torch._foreach_div_(tensors, group.size())
        return dist.ReduceOp.SUM
    return sum_or_mean(group.size())


class Holders:
    """Which parameters have a gradient on no rank, by a sum of ones over the ranks.

    A rank that has all its gradients, which is the rule, reads nothing on the host: nothing waits,
    and a CUDA graph can hold it.
    """

    def __init__(
        self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._names, self._group = names, group
        self._ones = torch.ones(len(names), device=device)
        self._counts = torch.empty_like(self._ones)
        self._last: tuple[list[int], set[int]] = [], set()

    def unused(self, missing: list[int]) -> set[int]:
        """Those of ``missing``, the parameters without a gradient on this rank, that no rank has
        one for; collective.

        In a CUDA graph's capture, which cannot read, what the last step found; RuntimeError where
        that was missing others.
        """
        self._counts.copy_(self._ones)
        for i in missing:
            # Not an assignment, which copies the number from the host: no capture allows that.
            self._counts[i].zero_()
        dist.all_reduce(self._counts, group=self._group)
        if capturing(self._ones.device):
            if missing != self._last[0]:
                other = sorted({*missing} ^ {*self._last[0]})
                raise RuntimeError(
                    f"{self._names[other[0]]} has a gradient in the captured step or in the one "
                    "before, not in both; warm up with the step that is captured"
                )
        else:
            counts = self._counts.tolist() if missing else []
            self._last = missing, {i for i in missing if not counts[i]}
        return self._last[1]


def capturing(device: torch.device) -> bool:
    """Whether the current stream's work goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

"""Collectives and agreements over a process group, for every class of this package."""

import itertools
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


# Several tensors in one call of the backend, on the current stream. They are the group's own
# methods, since PyTorch's functions, and its context manager, cost the host more than the call.
# Under TORCH_DISTRIBUTED_DEBUG=DETAIL a group has none of them.
_gather_options, _scatter_options = AllgatherOptions(), ReduceScatterOptions()
_gather_options.asyncOp = _scatter_options.asyncOp = False


def all_gather_coalesced(
    wholes: list[Tensor], parts: list[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Fill each whole with the ranks' parts, in rank order; a part may be its own slot there. All
    are bytes."""
    if _checks_each_call():
        for whole, part in zip(wholes, parts, strict=True):
            all_gather_single(whole, part, group=group)
        return
    group = group or dist.group.WORLD
    gather = getattr(group, "all_gather_single_coalesced", None)
    gather = gather or group.allgather_into_tensor_coalesced
    _done(gather(wholes, parts, _gather_options))


def reduce_scatter_coalesced(
    parts: list[Tensor], wholes: list[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Fill each part with this rank's slot of the mean of the ranks' wholes, all of one dtype."""
    group = group or dist.group.WORLD
    operator = mean_operator(wholes, group)
    if _checks_each_call():
        for part, whole in zip(parts, wholes, strict=True):
            reduce_scatter_single(part, whole, operator, group=group)
        return
    _scatter_options.reduceOp = operator
    scatter = getattr(group, "reduce_scatter_single_coalesced", None)
    scatter = scatter or group.reduce_scatter_tensor_coalesced
    _done(scatter(parts, wholes, _scatter_options))


def _checks_each_call() -> bool:
    """Return whether PyTorch compares each collective over the ranks before it runs it."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


class Mean:
    """Makes each of a call's tensors, all of one dtype, the mean of the ranks' own, on the
    backend's own stream behind what the current one has queued; the call returns what to wait
    for."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group or dist.group.WORLD
        self._one, self._several = AllreduceOptions(), AllreduceCoalescedOptions()
        self._one.asyncOp = self._several.asyncOp = True

    def __call__(self, tensors: list[Tensor]) -> list[dist.Work]:
        operator = mean_operator(tensors, self._group)
        self._one.reduceOp = self._several.reduceOp = operator
        if len(tensors) > 1 and not _checks_each_call():
            return [self._group.allreduce_coalesced(tensors, self._several)]
        return [self._group.allreduce([tensor], self._one) for tensor in tensors]


def _done(work: dist.Work | None) -> None:
    if work is not None:  # where the backend has not waited by itself
        work.wait()


def member(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return (rank, size) of this process in ``group``, None for the default one.

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
    """Return the values of all ranks, in rank order; collective."""
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_alike(what: str, lines: Sequence[str], group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on every rank unless all gave the same ``lines``; collective.

    The processes would pair other tensors than they mean: wrong sums, or a hang.
    """
    gathered = everyone(list(lines), group)
    for other, theirs in enumerate(gathered):
        for here, there in itertools.zip_longest(gathered[0], theirs, fillvalue="no more"):
            if here != there:
                raise ValueError(
                    f"{what} must be the same on every rank: rank 0 has {here}, rank {other} "
                    f"{there}"
                )


@torch.no_grad()
def make_alike(module: nn.Module, group: dist.ProcessGroup | None) -> torch.device:
    """Give the module's parameters and buffers the values of the group's rank 0; return their
    device. Collective. Raises ValueError where ranks differ in more, for shards of FSDP, for
    complex parameters that are trained, and as ``one_device``."""
    device = one_device(module)
    for name, p in module.named_parameters():
        if is_shard(p):
            raise ValueError(
                "a parameter is a shard of FSDP, another on each rank; FSDP averages it"
            )
        if p.is_complex() and p.requires_grad:
            raise ValueError(f"{name} is complex; keep it as pairs of real numbers (view_as_real)")
    check_alike("parameters", describe(module.named_parameters()), group)
    check_alike("buffers", describe(module.named_buffers()), group)
    for x in (*module.parameters(), *module.buffers()):
        if x.numel():
            # As bytes, whatever the dtype, in one block.
            dense = x.detach().contiguous()
            dist.broadcast(dense.reshape(-1).view(torch.uint8), group=group, group_src=0)
            if dense.data_ptr() != x.data_ptr():
                x.copy_(dense)
    return device


def is_shard(parameter: Tensor) -> bool:
    """Return whether it is of an FSDP, ours or PyTorch's: other ranks have other rows of it."""
    # DTensor's module takes a process more than a second to import.
    return hasattr(parameter, "device_mesh") or getattr(parameter, "_is_shard", False)


def local(x: Tensor) -> Tensor:
    """Return this rank's part of what may be a DTensor."""
    return x.to_local() if hasattr(x, "to_local") else x


def describe(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return name, shape, dtype and whether trained, a line a tensor."""
    lines = []
    for name, x in named:
        trained = " trained" if x.requires_grad else ""
        lines.append(f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}{trained}")
    return lines


def one_device(module: nn.Module) -> torch.device:
    """Return the device of every parameter and buffer; raises ValueError where there are several,
    or "meta"."""
    devices = {x.device for x in (*module.parameters(), *module.buffers())}
    if len(devices) > 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"parameters and buffers must be on one device and not meta; got {names}")
    return devices.pop() if devices else torch.device("cpu")


def mean_operator(
    tensors: list[Tensor], group: dist.ProcessGroup | None
) -> dist.ReduceOp.RedOpType:
    """Return the operator that makes each of `tensors`, all of one dtype, the mean of the ranks'.

    gloo adds before it divides, and a sum of float16 may be infinite where the mean is not. Those
    are divided here, in place, and the operator is a sum. So it is for a single rank: a mean of one
    has come out wrong in NCCL's reduce-scatter.
    """
    group = group or dist.group.WORLD
    if tensors[0].dtype == torch.float16 and dist.get_backend(group) == "gloo":
        torch._foreach_div_(tensors, group.size())
        return dist.ReduceOp.SUM
    return dist.ReduceOp.AVG if group.size() > 1 else dist.ReduceOp.SUM


def capturing(device: torch.device) -> bool:
    """Return whether the current stream's work goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

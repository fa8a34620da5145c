"""What every class of this package asks of its process group."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    options = AllgatherOptions()
    options.asyncOp = False
    gather = getattr(group, "all_gather_single_coalesced", None)
    gather = gather or group.allgather_into_tensor_coalesced
    _done(gather(wholes, parts, options))


def reduce_scatter_coalesced(
    parts: list[Tensor], wholes: list[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Fill each part with this rank's slot of the mean of the ranks' wholes, all of one dtype."""
    group = group or dist.group.WORLD
    operator = mean_operator(wholes, group)
    parts, wholes = _real(parts), _real(wholes)
    if _checks_each_call():
        for part, whole in zip(parts, wholes, strict=True):
            reduce_scatter_single(part, whole, operator, group=group)
        return
    options = ReduceScatterOptions()
    options.asyncOp, options.reduceOp = False, operator
    scatter = getattr(group, "reduce_scatter_single_coalesced", None)
    scatter = scatter or group.reduce_scatter_tensor_coalesced
    _done(scatter(parts, wholes, options))


def mean_coalesced(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Make each tensor the mean of the ranks' own, all of one dtype."""
    group = group or dist.group.WORLD
    operator = mean_operator(tensors, group)
    if _checks_each_call():
        for tensor in _real(tensors):
            dist.all_reduce(tensor, operator, group=group)
        return
    options = AllreduceCoalescedOptions()
    options.asyncOp, options.reduceOp = False, operator
    _done(group.allreduce_coalesced(_real(tensors), options))


def _checks_each_call() -> bool:
    """Whether PyTorch compares each collective over the ranks before it runs it."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


class Mean:
    """Makes each of a call's tensors, all of one dtype, the mean of the ranks' own, on the
    backend's own stream behind what the current one has queued; the call returns what to wait
    for."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        member(group)
        self._group = group or dist.group.WORLD
        self._one, self._several = AllreduceOptions(), AllreduceCoalescedOptions()
        self._one.asyncOp = self._several.asyncOp = True

    def __call__(self, tensors: list[Tensor]) -> list[dist.Work]:
        operator = mean_operator(tensors, self._group)
        tensors = _real(tensors)
        self._one.reduceOp = self._several.reduceOp = operator
        if len(tensors) > 1 and not _checks_each_call():
            return [self._group.allreduce_coalesced(tensors, self._several)]
        return [self._group.allreduce([tensor], self._one) for tensor in tensors]


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


class Members:
    """The parameters of a module as they were, and ``also`` others that may take their places. Who
    asks at each step whether they still are compares identities alone and walks no tree."""

    def __init__(self, module: nn.Module, also: Iterable[Tensor] = ()) -> None:
        self._module = module
        self._allowed = {id(p) for p in (*module.parameters(), *also)}
        self._remember()

    def check(self) -> None:
        """Raise RuntimeError for a parameter that came or was replaced since then."""
        if self._identities() == self._before:
            return
        for name, p in self._module.named_parameters():
            if id(p) not in self._allowed:
                raise RuntimeError(
                    f"{name} came or was replaced after the module was wrapped, and its gradient is"
                    " not averaged; wrap the module anew"
                )
        self._remember()  # a module without parameters came or went

    def _remember(self) -> None:
        modules = list(self._module.modules())
        self._tables = [m._parameters for m in modules] + [m._modules for m in modules]
        self._before = self._identities()

    def _identities(self) -> list[int]:
        return [id(member) for table in self._tables for member in table.values()]


@dataclass(slots=True)
class Step:
    """What has happened since the last finish. Not attributes of a wrapper, which is a module: to
    set one of those costs the host as much as a message."""

    forwards: int = 0  # of the wrapper, whose backward is to be averaged
    accumulated: bool = False  # a backward has added to a gradient

    def clear(self) -> None:
        self.forwards, self.accumulated = 0, False


class Agreement:
    """What the ranks tell each other at the end of a step, in one sum over them: which parameters
    have a gradient on no rank, and whether all of them end the same step.

    The sum has a one for each parameter from each rank that has a gradient for it, and for each
    rank, in a place of its own, how many forwards it began since the last step. On the CPU all of
    it is read at once. On a GPU a rank that has all its gradients, which is the rule, reads nothing
    on the host, so that nothing waits and a CUDA graph can hold it; the ranks' numbers are looked
    at one step later.
    """

    GIVEN_UP = -1

    def __init__(
        self, names: Sequence[str], device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._names, self._group = names, group
        rank, size = member(group)
        self._place = len(names) + rank
        self._usual = torch.zeros(len(names) + size, dtype=torch.float32, device=device)
        self._usual[: len(names)] = 1
        self._usual[self._place] = 1
        self._counts = torch.empty_like(self._usual)
        self._last: tuple[list[int], set[int]] = [], set()
        # The ranks' numbers on their way to the host, each with the event behind it.
        self._coming: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def end_step(self, missing: list[int], forwards: int) -> set[int]:
        """Return those of ``missing``, the parameters without a gradient on this rank, that no rank
        has one for; ``forwards`` is the number of this rank's, or ``GIVEN_UP``. Collective.

        Raises RuntimeError on every rank, with the rank's number, where one ends another step than
        the others. In a CUDA graph's capture, which cannot read, returns what the last step found;
        RuntimeError where that was missing others.
        """
        self._counts.copy_(self._usual)
        for i in missing:
            # Not an assignment, which copies the number from the host: no capture allows that.
            self._counts[i].zero_()
        captured = capturing(self._counts.device)
        if forwards != 1 and not captured:
            self._counts[self._place].fill_(forwards)
        dist.all_reduce(self._counts, group=self._group)
        if captured:
            self._check_missing(missing)
            return self._last[1]
        if missing or forwards == self.GIVEN_UP or not self._counts.is_cuda:
            counts = self._counts.tolist()
            _check_same_step(counts[len(self._names) :])
            self._last = missing, {i for i in missing if not counts[i]}
        else:
            self._last = [], set()
            self._look_later()
        return self._last[1]

    def _check_missing(self, missing: list[int]) -> None:
        if missing != self._last[0]:
            other = sorted({*missing} ^ {*self._last[0]})
            raise RuntimeError(
                f"{self._names[other[0]]} has a gradient in the captured step or in the one "
                "before, not in both; warm up with the step that is captured"
            )

    def _look_later(self) -> None:
        """Start to bring the ranks' numbers to the host, and look at those that have come."""
        numbers = self._counts[len(self._names) :]
        room = torch.empty(len(numbers), dtype=torch.float32, pin_memory=True)
        room.copy_(numbers, non_blocking=True)
        behind = torch.cuda.Event()
        behind.record()
        self._coming.append((behind, room))
        while self._coming[0][0].query():
            _, came = self._coming.popleft()
            _check_same_step(came.tolist())
            if not self._coming:
                return


def _check_same_step(forwards: list[float]) -> None:
    """Raise RuntimeError unless every rank has the same number."""
    least, most = min(forwards), max(forwards)
    if least == most:
        return
    if least == Agreement.GIVEN_UP:
        raise RuntimeError(
            f"rank {forwards.index(least)} gave up, by reset(), the step that rank "
            f"{forwards.index(most)} finished: every rank gives up a step, or none"
        )
    raise RuntimeError(
        f"rank {forwards.index(most)} began {most:.0f} forwards since the last step and rank "
        f"{forwards.index(least)} began {least:.0f}: one has skipped a step, which every rank has "
        "to skip, by reset(); a forward of some ranks alone belongs into no_grad() or no_sync()"
    )


def capturing(device: torch.device) -> bool:
    """Whether the current stream's work goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

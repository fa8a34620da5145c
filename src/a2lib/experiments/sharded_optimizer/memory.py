"""What each rank does for the memory: one task is one training, launched; a model, wrapper and
optimizer of its own for each way, dropped before the next.

What tensors ask of the allocator is read at three moments of the first step, and its most since the
moment before; then the most of a later step, and the bytes of its collectives.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from a2lib.experiments.data_parallel.training import Training
from a2lib.experiments.data_parallel.turns import on_stream
from a2lib.experiments.harness.ranks import RankJob
from a2lib.experiments.sharded_optimizer.configurations import MOMENTS
from a2lib.experiments.sharded_optimizer.handlers import unsupported, way_of
from a2lib.experiments.sharded_optimizer.optimizers import make, state_tensors, wrapped
from a2lib.measure import synchronize
from a2lib.measure.failures import note as one_line

Row = dict[str, object]
# PyTorch's names of collectives, and the columns of the bytes that they are given.
COLLECTIVES = {
    "allreduce": "reduced_bytes",
    "allgather": "gathered_bytes",
    "broadcast": "broadcast_bytes",
}


def measure(job: RankJob) -> None:
    """Read the memory of each way that is wanted."""
    for culprit, keys in job.wanted.items():
        if job.expired():
            return
        job.begin(culprit)
        with on_stream(job.device):
            found = job.everyone(_rows(job, keys[0]))
        for key in keys:
            job.put({**key, **found[int(key["on_rank"])][str(key["moment"])]})


def _rows(job: RankJob, key: Row) -> dict[str, Row]:
    """Moment -> the values of this rank's row."""
    _drop_all(job.device)
    training = Training(job.spec, job.device, job.rank, job.seed)
    way = way_of(key)
    reason = unsupported(training, way)
    if reason:
        row = {"status": "unsupported", "note": one_line(reason)}
        return dict.fromkeys(MOMENTS, row)
    meter = Meter(job.device)
    bare = meter.present()
    with training.wrapped(lambda model: wrapped(model, way)):
        optimizer = make(way.optimizer, training)
        training.workload.optimizer = watched = Watched(optimizer)
        # The memory that wrapper and optimizer keep beside what is counted by name.
        kept = {} if bare is None else {"buffer_bytes": max(0, meter.present() - bare)}

        def read() -> Row:
            return {**meter.read(training, optimizer), **kept}

        rows = {"init": read()}
        with watched.calling(before=lambda: rows.update(before=read()),
                             after=lambda: rows.update(after=read())):  # fmt: skip
            training.step(send=True)
        training.step(send=True)  # PyTorch's wrapper makes its buckets anew
        meter.reset()
        training.step(send=True)
        rows["step"] = read()
        with Counted() as counted:
            training.step(send=True)
        rows["step"] |= counted.bytes
        synchronize(job.device)
    return {moment: {"status": "ok", "note": "", **row} for moment, row in rows.items()}


def _drop_all(device: str) -> None:
    gc.collect()
    if device == "cuda":
        synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


@dataclass
class Watched:
    """An optimizer, and what is to be called directly before its step and directly after."""

    optimizer: torch.optim.Optimizer
    around: tuple = field(default=(lambda: None, lambda: None))

    @contextlib.contextmanager
    def calling(self, before, after) -> Iterator[None]:
        self.around = before, after
        yield
        self.around = (lambda: None, lambda: None)

    def step(self) -> None:
        before, after = self.around
        before()
        self.optimizer.step()
        after()

    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)


class Meter:
    """The bytes of tensors by what they are, and as the allocator counts them, on a GPU."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self.reset()

    def reset(self) -> None:
        if self._cuda:
            synchronize("cuda")
            torch.cuda.reset_peak_memory_stats()

    def present(self) -> int | None:
        return torch.cuda.memory_stats()["requested_bytes.all.current"] if self._cuda else None

    def read(self, training: Training, optimizer: torch.optim.Optimizer) -> Row:
        """All of it now, and the allocator's most since the last call."""
        params = training.parameters
        row = {
            "parameter_bytes": held(params),
            "gradient_bytes": held(p.grad for p in params if p.grad is not None),
            "optimizer_bytes": held(state_tensors(optimizer)),
        }
        if self._cuda:
            synchronize("cuda")
            stats = torch.cuda.memory_stats()
            free, total = torch.cuda.mem_get_info()
            row |= {
                "present_bytes": stats["requested_bytes.all.current"],
                "tensor_bytes": stats["requested_bytes.all.peak"],
                "allocated_bytes": stats["allocated_bytes.all.peak"],
                "reserved_bytes": stats["reserved_bytes.all.current"],
                "driver_bytes": total - free,
            }
            self.reset()
        return row


def held(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class Counted(TorchDispatchMode):
    """Bytes of the tensors that collectives are given; of a gather what it ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = dict.fromkeys(COLLECTIVES.values(), 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs: Mapping | None = None):
        if function.namespace == "c10d":
            called = function._schema.name.partition("::")[2].strip("_")
            for name, column in COLLECTIVES.items():
                if called.startswith(name):
                    self.bytes[column] += held(_tensors(args[0]))
        return function(*args, **(kwargs or {}))


def _tensors(given: object) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _tensors(one)

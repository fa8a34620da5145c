"""What each rank does for the memory: one task is one training, launched, with a model, a wrapper
and an optimizer of its own for each way, dropped before the next.

Bytes are those of tensors by what they are, and on a GPU what tensors ask of the allocator, which
is known to the host at once.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from a2lib.experiments.data_parallel.configurations import BEST_MB, STEADY, WHOLE, Way
from a2lib.experiments.data_parallel.sharded import Sharded, local
from a2lib.experiments.data_parallel.training import Training, on_stream, own_state, wrap
from a2lib.experiments.harness import RankJob, Row, free_memory
from a2lib.lab import synchronize
from a2lib.lab.failures import note as one_line
from a2lib.lab.memory import clear, requested_bytes, take_workspaces
from a2lib.parallel import FSDP

# PyTorch's names of collectives, and how the columns begin of the bytes that they are given.
COLLECTIVES = {"allreduce": "reduced", "allgather": "gathered", "broadcast": "broadcast"}
# Of what FSDP tells.
COLUMNS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "gathered": "whole_bytes",
    "travelling": "travelling_bytes",
}


def sharded_optimizer(job: RankJob) -> None:
    """Each rank at three moments of the first step, with the most since the moment before; then the
    most of a later step, and the bytes of its collectives."""
    _each(job, _first_step, itemgetter("moment"))


def fsdp(job: RankJob) -> None:
    """Rank 0 at the moments of the first step and of a later one."""
    _each(job, _two_steps, itemgetter("step_number", "moment"))


def _each(job: RankJob, look: Callable, which: Callable[[Row], object]) -> None:
    """Put what ``look`` finds of each way that is wanted, by ``which`` of the rows it is: of every
    rank if they name one."""
    for keys in job.each():
        with on_stream(job.device):
            with contextlib.ExitStack() as held:
                found = look(job, Way.from_key(keys[0]), held)
            by_rank = job.everyone(found) if "on_rank" in keys[0] else [found]
        found = [by_rank[key.get("on_rank", 0)][which(key)] for key in keys]
        job.put(*({**key, "status": "ok", **row} for key, row in zip(keys, found, strict=True)))


def _first_step(job: RankJob, way: Way, stack: contextlib.ExitStack) -> dict[str, Row]:
    """Moment -> the values of this rank's row."""
    synchronize(job.device)
    clear(job.device)
    training = Training(job.spec, job.device, job.rank, job.seed)
    if reason := training.refusal(way):
        row = {"status": "unsupported", "note": one_line(reason)}
        return dict.fromkeys((key["moment"] for key in job.keys), row)
    reset(job.device)
    bare = requested_bytes(job.device)
    stack.enter_context(training.wrapped(lambda model: wrap(model, way)))
    training.workload.optimizer = optimizer = training.make_optimizer(way.optimizer)
    # The memory that wrapper and optimizer keep beside what is counted by name.
    more = max(0, requested_bytes(job.device) - bare)
    kept: Row = {"buffer_bytes": more} if job.device == "cuda" else {}
    rows: dict[str, Row] = {}

    def read(moment: str) -> None:
        """All of it, and the most since the last one."""
        synchronize(job.device)
        found = held_bytes(optimizer) | present(job.device) | most(job.device)
        rows[moment] = found | kept
        reset(job.device)

    read("init")
    with (
        optimizer.register_step_pre_hook(lambda *_: read("before")),
        optimizer.register_step_post_hook(lambda *_: read("after")),
    ):
        training.step(send=True)
    training.step(send=True)  # PyTorch's wrapper makes its buckets anew
    reset(job.device)
    training.step(send=True)
    read("step")
    with Counted() as counted:
        training.step(send=True)
    rows["step"] |= counted.bytes
    synchronize(job.device)
    return rows


def _two_steps(job: RankJob, way: Way, stack: contextlib.ExitStack) -> dict[tuple, Row]:
    """(Step, moment) -> the values of this rank's row."""
    take_workspaces(job.device)
    free_memory(job.device)
    entry = requested_bytes(job.device)
    given = job.spec, job.device, job.rank, job.seed
    if way.wrapper in WHOLE:
        training, whole = Training(*given), Way("bucketed", BEST_MB)
        stack.enter_context(training.wrapped(lambda model: wrap(model, whole)))
        training.workload.optimizer = training.make_optimizer(WHOLE[way.wrapper])
    else:
        training = Sharded(*given, way.wrapper)
    ours, optimizer = isinstance(training.wrapper, FSDP), training.workload.optimizer
    rows: dict[tuple[int, str], Row] = {}
    fullest: Row = {}

    def now() -> Row:
        row = held_bytes(optimizer)
        if ours:
            told = training.wrapper.held_bytes()
            row |= {column: told[name] for name, column in COLUMNS.items()}
        return row | present(job.device, entry)

    def total(row: Row) -> int:
        return row.get("present_bytes", sum(row.values()))

    def note(number: int, moment: str) -> Callable[..., None]:
        return lambda *_: rows.update({(number, moment): now()})

    def sample(*_: object) -> None:
        fullest.update(max(fullest, now(), key=total))

    note(0, "init")()
    for number in range(STEADY + 1):
        if number == STEADY:
            reset(job.device)
            if ours:
                training.wrapper.observe(sample)
        with (
            optimizer.register_step_pre_hook(note(number, "before")),
            optimizer.register_step_post_hook(note(number, "after")),
            training.calling({"backward": note(number, "forward")}),
        ):
            training.step(send=True)
        synchronize(job.device)
    if ours:
        training.wrapper.observe(None)
    # Of PyTorch's it is not known what there is beside its parameters.
    peak = {**fullest} if fullest or job.device == "cuda" else rows[STEADY, "before"]
    rows[STEADY, "peak"] = peak | most(job.device, entry)
    return rows


def present(device: str, less: int = 0) -> Row:
    return {"present_bytes": requested_bytes(device) - less} if device == "cuda" else {}


def reset(device: str) -> None:
    """``most`` is from now on."""
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def most(device: str, less: int = 0) -> Row:
    if device != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    free, total = torch.cuda.mem_get_info()
    return {
        "tensor_bytes": stats["requested_bytes.all.peak"] - less,
        "allocated_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "driver_bytes": total - free,
    }


def held_bytes(optimizer: Optimizer) -> Row:
    """What this rank holds of parameters, gradients and AdamW's state. The parameters are the
    optimizer's, since a sharded module's are whole ones while it computes."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = (x for values in own_state(optimizer).values() for x in values.values())
    return {
        "parameter_bytes": held(parameters),
        "gradient_bytes": held(p.grad for p in parameters if p.grad is not None),
        "optimizer_bytes": held(x for x in state if isinstance(x, torch.Tensor)),
    }


def held(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(x).nbytes for x in tensors)


class Counted(TorchDispatchMode):
    """Bytes of the tensors that collectives are given; of a gather what it ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {f"{sent}_bytes": 0 for sent in COLLECTIVES.values()}

    def __torch_dispatch__(self, function, types, args=(), kwargs: Mapping | None = None):
        if function.namespace == "c10d":
            called = function._schema.name.partition("::")[2].strip("_")
            for name, sent in COLLECTIVES.items():
                if called.startswith(name):
                    self.bytes[f"{sent}_bytes"] += held(tree_leaves(args[0]))
        return function(*args, **(kwargs or {}))

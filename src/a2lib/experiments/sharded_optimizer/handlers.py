"""What each rank does for the times: one task is one training, each wrapper with its optimizers.

The optimizers of a wrapper are timed in turns with each other and with the step of one GPU, without
communication and with the whole update. On a GPU everything is on one stream that is not the
default one, since a step may be captured there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping

from torch.optim import Optimizer

from a2lib.experiments.data_parallel.training import TOLERANCE, Training
from a2lib.experiments.data_parallel.turns import WARMUP, in_turns, on_stream
from a2lib.experiments.harness.conditions import conditions
from a2lib.experiments.harness.ranks import RankJob
from a2lib.experiments.harness.rest import Mark, meet, slowest
from a2lib.experiments.sharded_optimizer.configurations import Way
from a2lib.experiments.sharded_optimizer.optimizers import make, unlike, wrapped
from a2lib.measure import SHARDED_OPTIMIZER, synchronize
from a2lib.measure.failures import note as one_line
from a2lib.parallel import capture_step
from a2lib.parallel.copy_engines import why_not

Row = dict[str, object]
# How often the update is timed apart.
ALONE = 5


def measure(job: RankJob) -> None:
    """Measure each wrapper's optimizers that are wanted."""
    if job.expired():
        return
    job.begin(next(iter(job.wanted)))
    with on_stream(job.device), contextlib.ExitStack() as held:
        training = Training(job.spec, job.device, job.rank, job.seed)
        wanted = [way_of(key).optimizer for keys in job.wanted.values() for key in keys]
        # All of them before anything is captured: one moves the parameters.
        optimizers = {name: make(name, training) for name in dict.fromkeys(("plain", *wanted))}
        without = step_with(training, optimizers["plain"], send=False)
        for _ in range(WARMUP):
            without()
        if job.spec["capture"]:
            without = held.enter_context(capture_step(without)).replay
        for culprit, keys in job.wanted.items():
            if job.expired():
                return
            job.begin(culprit)
            for key, row in zip(keys, _measure(job, training, optimizers, without, keys),
                                strict=True):  # fmt: skip
                job.put({**key, "conditions": conditions(job.device), **row})


def way_of(key: Row) -> Way:
    return Way(**{field.name: key[field.name] for field in dataclasses.fields(Way)})


def step_with(training: Training, optimizer: Optimizer, send: bool = True) -> Callable:
    def step():
        training.workload.optimizer = optimizer
        return training.step(send=send)

    return step


def _measure(
    job: RankJob, training: Training, optimizers: Mapping[str, Optimizer], without: Callable,
    keys: list[Row],
) -> list[Row]:  # fmt: skip
    """The rows of one wrapper, the same on every rank."""
    ways = [way_of(key) for key in keys]
    reason = unsupported(training, ways[0])
    if reason:
        return [{"status": "unsupported", "note": one_line(reason)}] * len(ways)
    with training.wrapped(lambda model: wrapped(model, ways[0])), contextlib.ExitStack() as held:
        steps, rows = [], []
        for way in ways:
            step = step_with(training, optimizers[way.optimizer])
            for _ in range(WARMUP):
                step()
            row = _checked(job, training, way)
            if row["status"] != "ok":
                return [row] * len(ways)
            row["ms_optimizer"] = slowest(
                job.everyone([_update(job.device, training) for _ in range(ALONE)])
            ).ms
            rows.append(row)
            steps.append(step)
        if job.spec["capture"]:
            steps = [held.enter_context(capture_step(step)).replay for step in steps]
        times = in_turns(job, SHARDED_OPTIMIZER, steps, without)
        return [{**row, **time} for row, time in zip(rows, times, strict=True)]


def unsupported(training: Training, way: Way) -> str | None:
    engines = way.carrier == "copy_engines"
    return why_not(None, training.parameters[0].device) if engines else None


def _checked(job: RankJob, training: Training, way: Way) -> Row:
    """Whether gradients are the mean and weights those of their owners."""
    wrong = max(job.everyone(training.error()))
    if not wrong <= TOLERANCE:
        return {"status": "error", "note": f"gradients are off their mean by {wrong:.2g}"}
    lost = 0
    if way.optimizer != "plain":
        lost = max(job.everyone(unlike(training, training.workload.optimizer)))
    if lost:
        return {"status": "error", "note": f"{lost} of the parameters looked at are not exchanged"}
    return {"status": "ok", "note": ""}


def _update(device: str, training: Training) -> float:
    """Milliseconds of the update, exchange included, that all ranks start together."""
    marks: list[Mark] = []
    training.step(send=True, before_optimizer=lambda: meet(device), marks={"optimizer": marks})
    synchronize(device)
    begin, end = marks
    return begin.ms_until(end)

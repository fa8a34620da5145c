"""What each rank does for the section of data parallelism: one task is one training, many ways.

Each way is timed in turns with the same step without communication, in the same processes. On a
GPU everything is on one stream that is not the default one, since a step may be captured there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable

from a2lib.experiments.data_parallel.training import TOLERANCE, Training
from a2lib.experiments.data_parallel.turns import WARMUP, in_turns, on_stream
from a2lib.experiments.ddp import traces
from a2lib.experiments.ddp.configurations import SENT_DTYPES, UPDATING, Way
from a2lib.experiments.ddp.wrappers import wrap
from a2lib.experiments.harness.conditions import conditions
from a2lib.experiments.harness.ranks import RankJob
from a2lib.experiments.harness.rest import Mark, meet, slowest
from a2lib.measure import DDP, synchronize
from a2lib.measure.failures import note as one_line
from a2lib.parallel import capture_step
from a2lib.parallel.copy_engines import why_not

Row = dict[str, object]
# How often the communication is timed alone.
ALONE = 5


def measure(job: RankJob) -> None:
    """Measure each way that is wanted."""
    if job.expired():
        return
    job.begin(next(iter(job.wanted)))
    with on_stream(job.device), contextlib.ExitStack() as held:
        training = Training(job.spec, job.device, job.rank, job.seed)
        for _ in range(WARMUP):
            training.step(send=False)
        without = lambda: training.step(send=False)  # noqa: E731
        if job.spec["capture"]:
            without = held.enter_context(capture_step(without)).replay
        for culprit, keys in job.wanted.items():
            if job.expired():
                return
            job.begin(culprit)
            for key in keys:
                job.put({**key, "conditions": conditions(job.device),
                         **_measure(job, training, without, _way(key))})  # fmt: skip
        # At the end, so that a profiler costs no row.
        drawn = traces.drawn(job.spec, job.device)
        for key in itertools.chain(*job.wanted.values()):
            if _way(key) in drawn and not _unsupported(training, _way(key)):
                if job.expired():
                    return
                traces.draw(job, training, _way(key), key)


def _way(key: Row) -> Way:
    return Way(**{field.name: key[field.name] for field in dataclasses.fields(Way)})


def _measure(job: RankJob, training: Training, without: Callable, way: Way) -> Row:
    """The values of a row, the same on every rank."""
    reason = _unsupported(training, way)
    if reason:
        return {"status": "unsupported", "note": one_line(reason)}
    with contextlib.ExitStack() as held:
        alone = []
        if way.wrapper == UPDATING:
            held.enter_context(training.updating())
            if job.spec["capture"]:
                # Before there is a wrapper, whose hooks wait for the same gradients.
                beside = capture_step(lambda: training.step(send=False))
                alone.append(held.enter_context(beside).replay)
        held.enter_context(training.wrapped(lambda model: wrap(model, way)))
        for _ in range(WARMUP):
            training.step(send=True)
        wrong = max(job.everyone(training.error()))
        if not wrong <= TOLERANCE:
            return {"status": "error", "note": f"gradients are off their mean by {wrong:.2g}"}
        row = {"status": "ok", "note": ""}
        row["sent_bytes"] = SENT_DTYPES[way.sent_dtype] * sum(
            p.numel() for p in training.parameters
        )
        step = lambda: training.step(send=True)  # noqa: E731
        if job.spec["capture"]:
            step = held.enter_context(capture_step(step)).replay
        else:
            row |= _parts(job, training)
        times, *others = in_turns(job, DDP, [step, *alone], without)
        if others:
            row["ms_without_updating"] = others[0]["ms"]
        return row | times


def _unsupported(training: Training, way: Way) -> str | None:
    engines = way.carrier == "copy_engines"
    return why_not(None, training.parameters[0].device) if engines else None


def _parts(job: RankJob, training: Training) -> Row:
    """What backward takes without communication, and what communication takes without backward."""
    backward, alone = zip(*(_apart(job.device, training) for _ in range(ALONE)), strict=True)
    row = {"ms_backward_without": slowest(job.everyone(backward)).ms}
    if training.finishes:
        row["ms_communication"] = slowest(job.everyone(alone)).ms
    return row


def _apart(device: str, training: Training) -> tuple[float, float]:
    marks: list[Mark] = []

    def finish() -> None:
        meet(device)
        marks.append(Mark(device))
        training.finish()
        marks.append(Mark(device))

    training.step(send=False, before_optimizer=finish, marks={"backward": marks})
    synchronize(device)
    begin, end, first, last = marks
    return begin.ms_until(end), first.ms_until(last)

"""What each rank does for the times: one task is one training, many ways.

Each way is timed in turns with the step of one GPU, the same without communication, in the same
processes. On a GPU everything is on one stream that is not the default one, since a step may be
captured there.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from a2lib.experiments.data_parallel import configurations, gathers, sharded, traces
from a2lib.experiments.data_parallel.configurations import SENT_DTYPES, UPDATING, Way
from a2lib.experiments.data_parallel.sharded import Sharded
from a2lib.experiments.data_parallel.training import TOLERANCE, Training, on_stream, replayed, wrap
from a2lib.experiments.harness import RankJob, Row, free_memory
from a2lib.lab import synchronize, timing
from a2lib.lab.clock import Mark
from a2lib.lab.failures import note as one_line
from a2lib.lab.timing import each_rank, meet, slowest

# What of a way is measured by itself, once it is right and before it is captured.
Apart = Callable[[RankJob, Training, Way], Row]
WARMUP = 4
# Steps that are timed of each way, the fewest where one is long: it varies little then.
STEPS, FEWEST = 20, 10
LONG_MS = 300.0
# How often the communication, or the update, is timed apart.
ALONE = 5
# Of the memory of a GPU, what weights, gradients and moments of all that are in turns may take.
SHARE = 0.7


def ddp(job: RankJob) -> None:
    """Time each way to average gradients, then draw some."""
    if job.expired():
        return
    with _one_gpu(job) as one:
        _measure(job, one, _sent)
        # At the end, so that a profiler costs no row.
        drawn = traces.drawn(job.spec, job.device)
        for key in job.keys:
            way = Way.from_key(key)
            if way in drawn and not one.training.refusal(way):
                if job.expired():
                    return
                traces.draw_averaging(job, one.training, way, key)


def sharded_optimizer(job: RankJob) -> None:
    """Time each wrapper's optimizers, in turns with each other too."""
    if job.expired():
        return
    names = dict.fromkeys(["plain", *(key["optimizer"] for key in job.keys)])
    with _one_gpu(job, names) as one:
        _measure(job, one, _updated)


def fsdp(job: RankJob) -> None:
    """Time each wrapper, all in turns where their states fit together; then look at ours."""
    if job.expired():
        return
    # Ours last: what is drawn of it takes a profiler, which leaves the processes slower.
    keys = sorted(job.keys, key=lambda key: key["wrapper"] == configurations.FSDP)
    with _one_gpu(job) as one:
        state = 16 * sum(p.numel() for p in one.training.parameters)
        needed = state * (1 + len(keys) / job.world_size)
        fit = job.device != "cuda" or needed <= SHARE * torch.cuda.mem_get_info()[1]
        groups = [keys] if fit else [[key] for key in keys]
        for group in groups:
            if job.expired():
                return
            free_memory(job.device)  # wrappers are cycles
            _measure_sharded(job, group, one)


@dataclass(frozen=True)
class OneGpu:
    """A training, optimizers for it by name, and its ``step`` without communication."""

    training: Training
    optimizers: Mapping[str, Optimizer]
    step: Callable[[], object]


@contextlib.contextmanager
def _one_gpu(job: RankJob, names: Iterable[str] = ()) -> Iterator[OneGpu]:
    """That of the job, warm, with the optimizers ``names``."""
    job.begin(next(iter(job.wanted)))
    with on_stream(job.device), contextlib.ExitStack() as held:
        training = Training(job.spec, job.device, job.rank, job.seed)
        # All of them before anything is captured: one moves the parameters.
        optimizers = {name: training.make_optimizer(name) for name in names}
        step = training.stepping(optimizers.get("plain"), send=False, warmup=WARMUP)
        yield OneGpu(training, optimizers, replayed(job, held, step))


def _measure(job: RankJob, one: OneGpu, apart: Apart) -> None:
    for keys in job.each():
        rows = _rows(job, one, apart, [Way.from_key(key) for key in keys])
        job.put(*({**key, **row} for key, row in zip(keys, rows, strict=True)))


def _rows(job: RankJob, one: OneGpu, apart: Apart, ways: Sequence[Way]) -> list[Row]:
    """The values of the rows of one wrapper, the same on every rank."""
    training = one.training
    if reason := training.refusal(ways[0]):
        return [{"status": "unsupported", "note": one_line(reason)}] * len(ways)
    with contextlib.ExitStack() as held:
        alone = []
        if ways[0].wrapper == UPDATING:
            held.enter_context(training.updating())
            if job.spec["capture"]:
                # Before there is a wrapper, whose hooks wait for the same gradients.
                alone.append(replayed(job, held, training.stepping(None, send=False)))
        held.enter_context(training.wrapped(lambda model: wrap(model, ways[0])))
        steps, rows = [], []
        for way in ways:
            step = training.stepping(one.optimizers.get(way.optimizer), warmup=WARMUP)
            if wrong := _wrong(job, training, way):
                return [{"status": "error", "note": wrong}] * len(ways)
            rows.append({"status": "ok", **apart(job, training, way)})
            steps.append(step)
        steps = [replayed(job, held, step) for step in steps]
        times = in_turns(job, [*steps, *alone], one.step)
        if alone:
            rows[0]["ms_without_updating"] = times.pop()["ms"]
        return [{**row, **own} for row, own in zip(rows, times, strict=True)]


def _wrong(job: RankJob, training: Training, way: Way) -> str:
    """Unless gradients are the mean and weights those of their owners."""
    error = max(job.everyone(training.error()))
    if not error <= TOLERANCE:
        return f"gradients are off their mean by {error:.2g}"
    lost = 0
    if way.optimizer != "plain":
        lost = max(job.everyone(training.unlike()))
    return f"{lost} of the parameters looked at are not exchanged" if lost else ""


def _sent(job: RankJob, training: Training, way: Way) -> Row:
    """What is sent; launched, also what backward takes without communication, and what
    communication takes without backward."""
    elements = sum(p.numel() for p in training.parameters)
    row: Row = {"sent_bytes": SENT_DTYPES[way.sent_dtype] * elements}
    if not job.spec["capture"]:
        times = (_backward_and_finish(job.device, training) for _ in range(ALONE))
        backward, finish = zip(*times, strict=True)
        row["ms_backward_without"] = slowest(job.everyone(backward)).ms
        if training.finishes:
            row["ms_communication"] = slowest(job.everyone(finish)).ms
    return row


def _backward_and_finish(device: str, training: Training) -> tuple[float, float]:
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


def _updated(job: RankJob, training: Training, way: Way) -> Row:
    """What the update takes, exchange included, that all ranks start together."""
    times, device = [], job.device
    for _ in range(ALONE):
        marks: list[Mark] = []
        training.step(send=True, before_optimizer=lambda: meet(device), marks={"optimizer": marks})
        synchronize(device)
        begin, end = marks
        times.append(begin.ms_until(end))
    return {"ms_optimizer": slowest(job.everyone(times)).ms}


def _measure_sharded(job: RankJob, keys: list[Row], one: OneGpu) -> None:
    """Put the rows of ``keys``, and what is drawn of ours."""
    made: list[tuple[Row, Sharded]] = []
    steps: list[Callable] = []
    with contextlib.ExitStack() as held:
        for key in keys:
            job.begin(Way.from_key(key).label)
            training = Sharded(job.spec, job.device, job.rank, job.seed, key["wrapper"])
            step = training.stepping(None, warmup=WARMUP)
            wrong = sharded.worst(job.everyone(training.deviation_from(one.training)))
            if wrong.exceeds(sharded.TOLERANCE[job.spec["precision"]]):
                note = f"gradients are off their mean by {wrong}"
                job.refuse("error", note, [key])
                continue
            made.append((key, training))
            steps.append(replayed(job, held, step))
        times = in_turns(job, steps, one.step) if made else []
    # What comes takes as much memory again as the graph that is gone.
    free_memory(job.device)
    for (key, training), row in zip(made, times, strict=True):
        row |= {**key, "status": "ok"}
        if key["wrapper"] != configurations.FSDP:
            job.put(row)
            continue
        table = []
        try:
            table, row["ms_waited"] = gathers.look(job, training)
        except Exception as error:  # the times are measured, whatever the marks come to
            row["note"] = one_line(f"no marks: {error}")
        job.put(row)
        captured = job.spec["capture"]
        traces.put(job, "gathers", table, key, "captured" if captured else "launched")
        if not captured:
            traces.store(job, training, key, (), traces.sharding)


def in_turns(job: RankJob, steps: Sequence[Callable], without: Callable) -> list[Row]:
    """The times of each of ``steps``, and of ``without`` beside each; collective.

    Of every step of every turn the slowest rank's time counts. A row has ``ms`` with its quantiles,
    the medians of the ranks apart, ``ms_without`` with its own, and on a GPU ``ms_host``.
    """
    every = (without, *steps)
    times: list[list[float]] = [[] for _ in every]
    host: list[list[float]] = [[] for _ in every]
    longest = max(job.everyone(max(_turn(job.device, step, 1)[0][0] for step in every)))
    due = STEPS if longest < LONG_MS else FEWEST
    for place, count in timing.in_turns(dict.fromkeys(range(len(every)), due)):
        taken, issued = _turn(job.device, every[place], count)
        times[place] += taken
        host[place].append(issued)
    base = slowest(job.everyone(times[0]))
    rows = []
    for own, issued in zip(times[1:], host[1:], strict=True):
        by_rank = job.everyone(own)
        row = slowest(by_rank).row(job.store.section) | each_rank(by_rank)
        row |= {"ms_without": base.ms, "ms_without_p20": base.ms_p20, "ms_without_p80": base.ms_p80}
        if job.device == "cuda":
            row["ms_host"] = max(job.everyone(statistics.median(issued)))
        rows.append(row)
    return rows


def _turn(device: str, step: Callable, count: int) -> tuple[list[float], float]:
    """Milliseconds of each of ``count`` steps, one after another, and what the host took for one
    before them, from rest."""
    meet(device)
    start = time.perf_counter_ns()
    step()
    issued = (time.perf_counter_ns() - start) / 1e6
    marks = [Mark(device)]
    for _ in range(count):
        step()
        marks.append(Mark(device))
    synchronize(device)
    return [a.ms_until(b) for a, b in itertools.pairwise(marks)], issued

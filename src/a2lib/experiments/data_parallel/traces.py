"""A step as rank 0's GPU saw it, by torch.profiler: what ran beside what."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import torch

from a2lib.experiments.data_parallel.configurations import BEST_MB, Way, unusual
from a2lib.experiments.data_parallel.training import Training, replayed, wrap
from a2lib.experiments.harness.ranks import RankJob
from a2lib.lab import synchronize, trace
from a2lib.lab.kernel_names import COMMUNICATION, MATMUL
from a2lib.lab.trace import HOST, Kernel, Trace

ROWS = 1500
# Of averaged gradients, by whether the step is captured.
_BUCKETED = Way("bucketed", BEST_MB), Way("bucketed", BEST_MB, "copy_engines")
TRACED = {False: (Way("naive"), Way("overlapped"), *_BUCKETED), True: _BUCKETED}
# Of one model, since a profiler leaves the processes slower, which the next task has too. What has
# another precision, attention or compilation is a sweep by itself.
MODELS = ("xl25", "tiny")
WARMUP = 3  # the first of them agrees on an order
# Nanoseconds of a picture and of it before its moment, the end of an averaged backward or the first
# kernel of a sharded one.
AVERAGED = 30_000_000, 15_000_000
SHARDED = 24_000_000, 12_000_000


def drawn(spec: Mapping[str, object], device: str) -> tuple[Way, ...]:
    """Those ways to average the gradients of a training whose steps are drawn."""
    if spec["model"] in MODELS or unusual(spec, device):
        return TRACED[bool(spec["capture"])]
    return ()


def draw_averaging(job: RankJob, training: Training, way: Way, key: Mapping[str, object]) -> None:
    """Store the bulk table ``strip`` of a step of ``way``; collective."""
    captured = bool(key["capture"])
    with training.wrapped(lambda model: wrap(model, way)), contextlib.ExitStack() as held:
        step = replayed(job, held, training.stepping(None, warmup=WARMUP))
        words = way.label, "captured" * captured, unusual(key, job.device)
        store(job, training, key, words, lambda found: averaging(found, captured), step)


def store(
    job: RankJob,
    training: Training,
    key: Mapping[str, object],
    words: Sequence[str],
    rows_of: Callable[[Trace], list[dict]],
    step: Callable[[], object] | None = None,
    *,
    table: str = "strip",
    steps: int = 2,
) -> None:
    """Store ``rows_of`` a trace as a bulk table; collective. What fails leaves no picture; the
    words go where the rank's output goes."""
    try:
        found = record(training, job.rank == 0, step, steps)
        put(job, table, rows_of(found) if found else [], key, *words)
    except trace.TraceError as error:
        print(f"{table} of {', '.join(map(str, words))}: {error}")


def put(job: RankJob, table: str, rows: Sequence[Mapping], key: Mapping, *words: str) -> None:
    """Store rank 0's ``rows``, if there are any, as the bulk table of a training; ``words`` are in
    its name."""
    if rows and job.rank == 0:
        section = job.store.section.name
        named = (section, key["model"], *filter(None, words), job.world_size, "ranks")
        name = "-".join(map(str, named)).replace(" ", "-")
        job.picture(table, name, rows, {"section": section, **key})


def averaging(found: Trace, captured: bool = False) -> list[dict[str, object]]:
    """Rows of the bulk table ``strip`` around the end of the last backward. No phase is known of
    what is ``captured``: it ends with the last product then."""
    if captured:
        backward = [k for k in found.kernels if k.kind == MATMUL]
        if not backward:
            raise trace.TraceError("no product was traced")
    else:
        backward = last_backward(found)
    length, before = AVERAGED
    return strip(found, max(k.end_ns for k in backward) - before, length)


def sharding(found: Trace) -> list[dict[str, object]]:
    """Rows of the bulk table ``strip`` around the begin of the last backward."""
    length, before = SHARDED
    return strip(found, min(k.start_ns for k in last_backward(found)) - before, length)


def record(
    training: Training, here: bool, step: Callable[[], object] | None = None, steps: int = 2
) -> Trace | None:
    """The trace of so many steps, where it is to be taken ``here``; every rank takes them. ``step``
    is another one than the training's with its messages, a replay of it. Of the training ``device``
    is used and ``ranges``, which has a phase's context by its name."""
    step = step or (lambda: training.step(send=True))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if training.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities) if here else None
    ranges = torch.profiler.record_function if here else contextlib.nullcontext
    with mock.patch.object(training, "ranges", ranges), profiler or contextlib.nullcontext():
        for _ in range(steps):
            step()
        synchronize(training.device)
    if profiler is None:
        return None
    return trace.from_profiler(profiler)


def last_backward(found: Trace) -> list[Kernel]:
    """What the last of the steps computes in backward; raises TraceError where that is nothing."""
    backward = [k for k in found.kernels if k.phase == "backward" and k.kind != COMMUNICATION]
    if not backward:
        raise trace.TraceError("no kernel of a backward was traced")
    begun = max(span.start_ns for span in found.ranges if span.name == "backward")
    return [k for k in backward if k.launch is None or k.launch.start_ns >= begun] or backward


def strip(found: Trace, start_ns: int, length_ns: int) -> list[dict[str, object]]:
    """Rows of the bulk table ``strip`` from a moment on, without those of the host."""
    rows = trace.strip_rows(found.kernels, max(0, start_ns), length_ns, most=100 * ROWS)
    return [row for row in rows if row["stream"] != HOST][:ROWS]

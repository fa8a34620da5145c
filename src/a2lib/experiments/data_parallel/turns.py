"""Times of several ways to take a step, in turns in the same processes, on every rank."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

from a2lib.experiments.harness.ranks import RankJob
from a2lib.measure import synchronize
from a2lib.measure.graphs import CudaGraphs
from a2lib.measure.rest import Mark, each_rank, meet, slowest

Row = dict[str, object]
WARMUP = 4
# Each turn starts from rest, and its first step is not counted. The first turn has the fewest, and
# so have all where a step is long: it varies little then.
TURNS, FEWEST, STEPS = 5, 2, 4
LONG_MS = 300.0


def on_stream(device: str) -> contextlib.AbstractContextManager:
    """The context in which a training is made and run whose step may be captured later."""
    return CudaGraphs().on_stream() if device == "cuda" else contextlib.nullcontext()


def in_turns(job: RankJob, steps: Sequence[Callable], without: Callable) -> list[Row]:
    """The times of each of ``steps``, and of ``without`` beside each; collective.

    Of every step of every turn the slowest rank's time counts. A row has ``ms`` with its quantiles,
    the medians of the ranks apart, ``ms_without`` with its own, and on a GPU ``ms_host``.
    """
    every = (without, *steps)
    times: list[list[float]] = [[] for _ in every]
    host: list[list[float]] = [[] for _ in every]
    count = FEWEST
    for turn in range(TURNS):
        for place, step in enumerate(every):
            taken, issued = _turn(job.device, step, count)
            times[place] += taken
            host[place].append(issued)
        if not turn:
            longest = max(job.everyone(max(statistics.median(own) for own in times)))
            count = STEPS if longest < LONG_MS else FEWEST
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

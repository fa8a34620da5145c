"""Times of several ways to take a step, in turns in the same processes, on every rank."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from a2lib.experiments.harness.ranks import RankJob
from a2lib.measure import Section, Timing, synchronize
from a2lib.measure.graphs import CudaGraphs

Row = dict[str, object]
WARMUP = 4
# Each turn starts from rest, and its first step is not counted. The first turn has the fewest, and
# so have all where a step is long: it varies little then.
TURNS, FEWEST, STEPS = 5, 2, 4
LONG_MS = 300.0


def on_stream(device: str) -> contextlib.AbstractContextManager:
    """The context in which a training is made and run whose step may be captured later."""
    return CudaGraphs().on_stream() if device == "cuda" else contextlib.nullcontext()


class Mark:
    """A moment: on a GPU when the current stream comes to it, else now.

    One ``in_graph`` is part of the graph that is captured, and the moment that of its last replay.
    """

    def __init__(self, device: str, in_graph: bool = False) -> None:
        self._event = None
        if device == "cuda":
            self._event = torch.cuda.Event(enable_timing=True, external=in_graph)
            self._event.record()
        self._ns = time.perf_counter_ns()

    def ms_until(self, later: Mark) -> float:
        """Milliseconds; on a GPU both must have come."""
        if self._event is not None:
            return self._event.elapsed_time(later._event)
        return (later._ns - self._ns) / 1e6


def in_turns(
    job: RankJob, section: Section, steps: Sequence[Callable], without: Callable
) -> list[Row]:
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
        medians = [statistics.median(one) for one in by_rank]
        row = slowest(by_rank).row(section)
        row |= {"ms_rank_min": min(medians), "ms_rank_median": statistics.median(medians)}
        row |= {"ms_rank_max": max(medians)}
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


def slowest(by_rank: list[Sequence[float]]) -> Timing:
    """Of times that each rank took of the same calls: each call's longest."""
    return Timing.of([max(times) for times in zip(*by_rank, strict=True)])


def meet(device: str) -> None:
    """All ranks at rest, from where they start together; collective."""
    synchronize(device)
    dist.barrier()
    synchronize(device)

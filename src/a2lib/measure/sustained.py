"""How the time of a call develops while it is repeated without pause, second by second.

Each call is timed as in ``a2lib.measure.timing``, between events and behind a flush of the L2
cache, so that what differs from a short burst is the state of the device: the clock that its power
and temperature leave it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from a2lib.measure.device import Sensors
from a2lib.measure.timing import FLUSH_BYTES, Timing

IDLE_S = 2.0
# Calls are queued a batch ahead, so that the device never waits: about this long, and few enough
# that two batches fit the launch queue.
BATCH_MS = 50.0
BATCH_CALLS = 32
WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Second:
    """The calls that began in one second: ``power_w`` is the median of the driver's readings."""

    second: int
    timing: Timing
    power_w: float | None


class Train(Protocol):
    """Calls in a row on one device; times are in milliseconds since ``begin``."""

    def begin(self) -> None:
        """Wait until the device is idle, and set the time to 0."""

    def queue(self, call: Callable[[], object], n: int) -> object:
        """Queue ``n`` calls; what ``finish`` takes."""

    def finish(self, batch: object) -> list[tuple[float, float]]:
        """Wait for a batch: when each of its calls began, and how long it took."""

    def readings(self) -> tuple[int | None, float | None]:
        """The clock in MHz and the power in W at this moment."""


class CudaTrain:
    """CUDA events around each call on the current stream."""

    def __init__(self) -> None:
        import torch

        self._cuda, self._sensors = torch.cuda, Sensors()
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def begin(self) -> None:
        self._cuda.synchronize()
        self._start = self._cuda.Event(enable_timing=True)
        self._start.record()

    def queue(self, call: Callable[[], object], n: int) -> list:
        events = []
        for _ in range(n):
            pair = [self._cuda.Event(enable_timing=True) for _ in range(2)]
            self._flush.zero_()
            pair[0].record()
            call()
            pair[1].record()
            events.append(pair)
        return events

    def finish(self, batch: list) -> list[tuple[float, float]]:
        batch[-1][1].synchronize()
        return [(self._start.elapsed_time(a), a.elapsed_time(b)) for a, b in batch]

    def readings(self) -> tuple[int | None, float | None]:
        return self._sensors.sm_mhz(), self._sensors.power_w()


class CpuTrain:
    """The host's monotonic clock; a call is done when it is queued."""

    def begin(self) -> None:
        self._start = time.perf_counter_ns()

    def queue(self, call: Callable[[], object], n: int) -> list[tuple[float, float]]:
        taken = []
        for _ in range(n):
            began = time.perf_counter_ns()
            call()
            ended = time.perf_counter_ns()
            taken.append(((began - self._start) / 1e6, (ended - began) / 1e6))
        return taken

    def finish(self, batch: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return batch

    def readings(self) -> tuple[None, None]:
        return None, None


def seconds_of(
    call: Callable[[], object],
    *,
    device: str,
    n_seconds: int,
    second_s: float = 1.0,
    idle_s: float = IDLE_S,
) -> list[Second]:
    """Repeat ``call`` for ``n_seconds`` seconds without pause, after ``idle_s`` seconds of rest.

    ``device`` is "cuda" or "cpu". ``second_s`` makes a second shorter, for a trial. A second in
    which no call began has no entry. An exception of ``call`` passes through.
    """
    train = CudaTrain() if device == "cuda" else CpuTrain()
    return follow(train, call, n_seconds, second_s, idle_s)


def follow(
    train: Train, call: Callable[[], object], n_seconds: int, second_s: float, idle_s: float
) -> list[Second]:
    """``seconds_of`` on any ``train``."""
    train.begin()
    taken = train.finish(train.queue(call, WARM_UP_CALLS))
    estimate = sorted(ms for _, ms in taken)[len(taken) // 2]
    n = BATCH_CALLS if estimate <= 0 else max(1, min(BATCH_CALLS, int(BATCH_MS / estimate)))
    time.sleep(idle_s)
    samples: list[list[float]] = [[] for _ in range(n_seconds)]
    mhz: list[list[int | None]] = [[] for _ in range(n_seconds)]
    watts: list[list[float]] = [[] for _ in range(n_seconds)]
    for began, ms, (clock, power) in _calls(train, call, n, n_seconds * second_s * 1000):
        second = int(began / (second_s * 1000))
        if second < n_seconds:
            samples[second].append(ms)
            mhz[second].append(clock)
            watts[second] += [] if power is None else [power]
    return [
        Second(
            second,
            Timing.of(samples[second], mhz=mhz[second]),
            statistics.median(watts[second]) if watts[second] else None,
        )
        for second in range(n_seconds)
        if samples[second]
    ]


def _calls(
    train: Train, call: Callable[[], object], n: int, until_ms: float
) -> Iterator[tuple[float, float, tuple[int | None, float | None]]]:
    """When each call began, what it took, and the readings at the end of its batch."""
    train.begin()
    running = train.queue(call, n)
    last = 0.0
    while last < until_ms:
        following = train.queue(call, n)
        done = train.finish(running)
        now = train.readings()
        last = done[-1][0]
        for began, ms in done:
            yield began, ms, now
        running = following
    train.finish(running)

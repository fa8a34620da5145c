"""Time the phases of a step, by the device's clock and by the host's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from a2lib.benchmark.ranges import Ranges
from a2lib.benchmark.result import StepTimes
from a2lib.measure import synchronize


class Stopwatch:
    """Times one step after another.

        with stopwatch.step("step 0") as done:
            with stopwatch.phase("forward"):
                ...
        (times,) = done                            # StepTimes

    A step begins and ends with an idle device. Its phases are queued without waiting, and CUDA
    events around each take its time on the device. ``where`` says in words what is being done.
    """

    def __init__(self, device: str, ranges: Ranges):
        self.device, self.ranges = device, ranges
        self.where = "building the model"
        self._phases: dict[str, tuple] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[list[StepTimes]]:
        """A list that has the step's times once it is over; ``name`` is its range."""
        done: list[StepTimes] = []
        self._phases = {}
        self._name = self.where = name
        synchronize(self.device)
        with self.ranges(name):
            start = time.perf_counter()
            yield done
            synchronize(self.device)
            wall_ms = (time.perf_counter() - start) * 1e3
        done.append(self._times(wall_ms))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.where = f"{self._name}, {name}"
        with self.ranges(name):
            host, event = time.perf_counter(), self._event()
            yield
            end_event = self._event()
            self._phases[name] = (host, time.perf_counter(), event, end_event)

    def _event(self):
        if self.device == "cpu":
            return None
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _times(self, wall_ms: float) -> StepTimes:
        host_ms = {name: (end - start) * 1e3 for name, (start, end, *_) in self._phases.items()}
        phases = list(self._phases.values())
        if self.device == "cpu":
            return StepTimes(host_ms, host_ms, (phases[-1][1] - phases[0][0]) * 1e3, wall_ms)
        ms = {name: first.elapsed_time(last) for name, (*_, first, last) in self._phases.items()}
        return StepTimes(ms, host_ms, phases[0][2].elapsed_time(phases[-1][3]), wall_ms)

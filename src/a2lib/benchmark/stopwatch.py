"""Time the phases of a step, by the device's clock and by the host's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from a2lib.benchmark.ranges import Ranges
from a2lib.benchmark.result import StepTimes
from a2lib.measure import synchronize
from a2lib.measure.clock import Mark


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
        self._phases: dict[str, tuple[Mark, Mark]] = {}

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
            start = Mark(self.device)
            yield
            self._phases[name] = start, Mark(self.device)

    def _times(self, wall_ms: float) -> StepTimes:
        ms = {name: start.ms_until(end) for name, (start, end) in self._phases.items()}
        host_ms = {name: start.host_ms_until(end) for name, (start, end) in self._phases.items()}
        marks = list(self._phases.values())
        return StepTimes(ms, host_ms, marks[0][0].ms_until(marks[-1][1]), wall_ms)

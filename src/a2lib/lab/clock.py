"""The clock of a call: between CUDA events on a GPU, the host's on a CPU."""

import time
from collections.abc import Callable
from typing import Self

from a2lib.lab.device import Sensors, synchronize
from a2lib.lab.memory import free_memory

# As triton.testing.do_bench: several times the L2 cache of any GPU there is.
FLUSH_BYTES = 256 * 2**20


class Mark:
    """A moment: on a GPU when the current stream comes to it, else now.

    One ``in_graph`` is part of the graph that is captured, and the moment that of its last replay.
    """

    def __init__(self, device: str, in_graph: bool = False, *, now: bool = True) -> None:
        self._event = None
        if device == "cuda":
            import torch

            self._event = torch.cuda.Event(enable_timing=True, external=in_graph)
        if now:
            self.come()

    def come(self) -> None:
        """Be this moment: for a mark that was made before, ``now`` False."""
        if self._event is not None:
            self._event.record()
        self._ns = time.perf_counter_ns()

    def ms_until(self, later: Self) -> float:
        """Milliseconds; on a GPU both must have come."""
        if self._event is not None:
            return self._event.elapsed_time(later._event)
        return self.host_ms_until(later)

    def host_ms_until(self, later: Self) -> float:
        """Milliseconds between the calls that made them."""
        return (later._ns - self._ns) / 1e6


class Clock:
    """A clock for calls on "cuda" or "cpu".

    On "cuda" it is CUDA events around each call on the current stream, the L2 cache flushed before
    it. On "cpu" it is the host's monotonic clock; a call is done when it is queued, and caches are
    left as the call before left them.

    The calls of one batch are queued without waiting in between, so that the host runs ahead as it
    does in a training step and a launch is only seen where the host cannot keep up. ``sm_mhz`` is
    the clock of the multiprocessors near the end of the last ``samples``, None if not known.
    """

    def __init__(self, device: str) -> None:
        self._device, self._flush, self._sensors = device, None, None
        self.sm_mhz: int | None = None
        if device == "cuda":
            import torch

            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
            self._sensors = Sensors()

    def samples(self, fn: Callable[[], object], n: int) -> list[float]:
        """The milliseconds of each of ``n`` calls, all of them finished on return."""
        # Made before, since what the host does between two marks may be in the time.
        marks = [(Mark(self._device, now=False), Mark(self._device, now=False)) for _ in range(n)]
        for start, end in marks:
            if self._flush is not None:
                self._flush.zero_()
            start.come()
            fn()
            end.come()
        if self._sensors is not None:
            # Read while the queue is still being worked off: an idle GPU may have lowered it.
            self.sm_mhz = self._sensors.sm_mhz()
        synchronize(self._device)
        return [start.ms_until(end) for start, end in marks]

    def host(self, fn: Callable[[], object], n: int) -> float | None:
        """The host's milliseconds per call to issue ``n`` calls; None where it does the work."""
        if self._device == "cpu":
            return None
        synchronize(self._device)
        start = time.perf_counter_ns()
        for _ in range(n):
            fn()
        taken = time.perf_counter_ns() - start
        synchronize(self._device)
        return taken / n / 1e6

    def release(self) -> None:
        """Give back memory that a failed call left behind."""
        free_memory(self._device)

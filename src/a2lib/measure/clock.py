"""The clocks of a call: between CUDA events on a GPU, the host's on a CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from a2lib.measure.device import Sensors
from a2lib.theory.products import check_name

# As triton.testing.do_bench: several times the L2 cache of any GPU there is.
FLUSH_BYTES = 256 * 2**20


class CudaClock:
    """CUDA events around each call on the current stream, the L2 cache flushed before it.

    The calls of one batch are queued without waiting in between, so that the host runs ahead as it
    does in a training step and a launch is only seen where the host cannot keep up. ``sm_mhz`` is
    the clock of the multiprocessors near the end of the last ``samples``, None if not known.
    """

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("device='cuda', but there is no CUDA device; allowed here is 'cpu'")
        self._cuda = torch.cuda
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._sensors = Sensors()
        self.sm_mhz: int | None = None

    def begin(self) -> None:
        """Wait until the device is idle, and count the time of ``finish`` from here."""
        self._cuda.synchronize()
        self._start = self._cuda.Event(enable_timing=True)
        self._start.record()

    def queue(self, fn: Callable[[], object], n: int) -> list:
        """Queue ``n`` calls; what ``finish`` takes."""
        batch = [[self._cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
        for start, end in batch:
            self._flush.zero_()
            start.record()
            fn()
            end.record()
        return batch

    def finish(self, batch: list) -> list[tuple[float, float]]:
        """Wait for a batch: when each of its calls began, and how long it took, in milliseconds."""
        batch[-1][1].synchronize()
        return [(self._start.elapsed_time(a), a.elapsed_time(b)) for a, b in batch]

    def readings(self) -> tuple[int | None, float | None]:
        """The clock in MHz and the power in W at this moment."""
        return self._sensors.sm_mhz(), self._sensors.power_w()

    def samples(self, fn: Callable[[], object], n: int) -> list[float]:
        """The milliseconds of each of ``n`` calls, all of them finished on return."""
        batch = self.queue(fn, n)
        # Read while the queue is still being worked off: an idle GPU may have lowered it.
        self.sm_mhz = self._sensors.sm_mhz()
        self._cuda.synchronize()
        return [start.elapsed_time(end) for start, end in batch]

    def host(self, fn: Callable[[], object], n: int) -> float | None:
        """The host's milliseconds per call to issue ``n`` calls; None where it does the work."""
        self._cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(n):
            fn()
        taken = time.perf_counter_ns() - start
        self._cuda.synchronize()
        return taken / n / 1e6

    def release(self) -> None:
        """Give back memory that a failed call left behind."""
        gc.collect()
        self._cuda.empty_cache()


class CpuClock:
    """The same by the host's monotonic clock: a call is done when it is queued, and caches are left
    as the call before left them."""

    sm_mhz = None

    def begin(self) -> None:
        self._start = time.perf_counter_ns()

    def queue(self, fn: Callable[[], object], n: int) -> list[tuple[int, int]]:
        batch = []
        for _ in range(n):
            start = time.perf_counter_ns()
            fn()
            batch.append((start, time.perf_counter_ns()))
        return batch

    def finish(self, batch: list[tuple[int, int]]) -> list[tuple[float, float]]:
        return [((start - self._start) / 1e6, (end - start) / 1e6) for start, end in batch]

    def readings(self) -> tuple[None, None]:
        return None, None

    def samples(self, fn: Callable[[], object], n: int) -> list[float]:
        return [(end - start) / 1e6 for start, end in self.queue(fn, n)]

    def host(self, fn: Callable[[], object], n: int) -> None:
        return None

    def release(self) -> None:
        gc.collect()


def clock_of(device: str) -> CudaClock | CpuClock:
    """The clock of ``device``, "cuda" or "cpu"; ValueError for another."""
    check_name("device", device, ("cuda", "cpu"))
    return CudaClock() if device == "cuda" else CpuClock()

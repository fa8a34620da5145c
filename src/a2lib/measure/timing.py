"""How long a call takes, on a GPU or on the CPU.

On a GPU each sample is the time between two CUDA events around one call, after a buffer larger than
the L2 cache was overwritten, which is what ``triton.testing.do_bench`` (Triton 3.6) measures. That
function is not used itself because it calls ``fn`` at least eight times however long one call takes
(one call, five for an estimate, one warm-up, one sample), has no lower or upper bound on the number
of samples, and cannot alternate between implementations.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

DEVICES = ("cuda", "cpu")

# A call this long is not repeated to warm up: its first call is the warm-up.
LONG_MS = 1000.0
# The samples of each implementation are spread over this many turns.
TURNS = 10
# As triton.testing.do_bench: several times the L2 cache of any GPU there is.
FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """Median and 20 % and 80 % quantiles of ``n`` samples, in milliseconds.

    The field names are those of the result store.
    """

    ms: float
    ms_p20: float
    ms_p80: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summarise ``samples`` (milliseconds, at least one), interpolating linearly."""
        ordered = sorted(samples)
        p20, median, p80 = (_quantile(ordered, q) for q in (0.2, 0.5, 0.8))
        return cls(median, p20, p80, len(ordered))


class Clock(Protocol):
    def samples(self, fn: Callable[[], object], n: int) -> list[float]:
        """The milliseconds of each of ``n`` calls, all of them finished on return."""

    def release(self) -> None:
        """Give back memory that a failed call left behind."""


class CudaClock:
    """CUDA events around each call on the current stream, the L2 cache flushed before it.

    The calls of one batch are queued without waiting in between, so that the host runs ahead as it
    does in a training step and a launch is only seen where the host cannot keep up.
    """

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("device='cuda', but there is no CUDA device; allowed here is 'cpu'")
        self._cuda = torch.cuda
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def samples(self, fn: Callable[[], object], n: int) -> list[float]:
        events = [
            (self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True))
            for _ in range(n)
        ]
        for start, end in events:
            self._flush.zero_()
            start.record()
            fn()
            end.record()
        self._cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def release(self) -> None:
        gc.collect()
        self._cuda.empty_cache()


class CpuClock:
    """The host's monotonic clock around each call; caches are left as the call before left them."""

    def samples(self, fn: Callable[[], object], n: int) -> list[float]:
        taken = []
        for _ in range(n):
            start = time.perf_counter_ns()
            fn()
            taken.append((time.perf_counter_ns() - start) / 1e6)
        return taken

    def release(self) -> None:
        gc.collect()


def time_call(
    fn: Callable[[], object],
    *,
    device: str = "cuda",
    warmup_ms: float = 25,
    rep_ms: float = 100,
    min_n: int = 3,
    max_n: int = 500,
) -> Timing:
    """Time ``fn()``; see time_many for the parameters. An exception of ``fn`` passes through."""
    result = time_many(
        {"fn": fn}, device=device, warmup_ms=warmup_ms, rep_ms=rep_ms, min_n=min_n, max_n=max_n
    )["fn"]
    if isinstance(result, Exception):
        raise result
    return result


def time_many(
    functions: Mapping[str, Callable[[], object]],
    *,
    device: str = "cuda",
    warmup_ms: float = 25,
    rep_ms: float = 100,
    min_n: int = 3,
    max_n: int = 500,
) -> dict[str, Timing | Exception]:
    """Time several functions in turns, so that a drift of the clocks reaches all of them alike.

    Each function is called once untimed (compilation, autotuning), then for about ``warmup_ms``
    milliseconds, then sampled for about ``rep_ms``, at least ``min_n`` and at most ``max_n`` times;
    one that takes a second or more is only called once before its first sample. ``device`` is
    "cuda" or "cpu". A function's result is dropped at once; gradients that it accumulates are its
    own concern.

    Returns each name's Timing, or the exception that its function raised (out of memory included):
    that one is left out from there on and the rest go on. The exception carries its traceback as a
    note, since the traceback itself would keep the failed call's tensors alive. Raises ValueError
    for parameters that make no sense.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r}: allowed are {', '.join(DEVICES)}")
    if not 1 <= min_n <= max_n:
        raise ValueError(f"min_n {min_n}, max_n {max_n}: allowed is 1 <= min_n <= max_n")
    if not (warmup_ms >= 0 and 0 < rep_ms < math.inf and warmup_ms < math.inf):
        raise ValueError(f"warmup_ms {warmup_ms}, rep_ms {rep_ms}: must be >= 0 and > 0")
    clock = CudaClock() if device == "cuda" else CpuClock()
    return _time_in_turns(clock, functions, warmup_ms, rep_ms, min_n, max_n)


def _time_in_turns(
    clock: Clock,
    functions: Mapping[str, Callable[[], object]],
    warmup_ms: float,
    rep_ms: float,
    min_n: int,
    max_n: int,
) -> dict[str, Timing | Exception]:
    samples: dict[str, list[float]] = {}
    due: dict[str, int] = {}
    failed: dict[str, Exception] = {}
    cold: set[str] = set()

    def fail(name: str, error: Exception) -> None:
        failed[name] = _detached(error)
        # A device broken by the failed call refuses this too; each later call has its own error.
        with contextlib.suppress(Exception):
            clock.release()
        # The others' cached memory went too: their next call allocates, and must not be a sample.
        cold.update(samples)

    for name, fn in functions.items():
        try:
            estimate, samples[name] = _warm_up(clock, fn, warmup_ms, max_n)
        except Exception as error:
            fail(name, error)
        else:
            wanted = max_n if estimate <= 0 else math.ceil(min(rep_ms / estimate, max_n))
            due[name] = max(wanted, min_n) - len(samples[name])
    for turn in range(TURNS):
        for name, total in due.items():
            n = total * (turn + 1) // TURNS - total * turn // TURNS
            if name in failed or n == 0:
                continue
            try:
                if name in cold:
                    clock.samples(functions[name], 1)
                    cold.discard(name)
                samples[name] += clock.samples(functions[name], n)
            except Exception as error:
                fail(name, error)
    return {n: failed[n] if n in failed else Timing.of(samples[n]) for n in functions}


def _warm_up(
    clock: Clock, fn: Callable[[], object], warmup_ms: float, max_n: int
) -> tuple[float, list[float]]:
    """The estimated milliseconds of a call, and the samples that already count."""
    clock.samples(fn, 1)
    (second,) = clock.samples(fn, 1)
    if second >= LONG_MS:
        return second, [second]
    # The second call may still compile or allocate: it decides how long to warm up, no more.
    calls = max_n if second <= 0 else int(min(warmup_ms / second, max_n))
    warm = clock.samples(fn, max(1, calls))
    return Timing.of(warm).ms, []


def _detached(error: Exception) -> Exception:
    """``error`` without the frames that hold on to the failed call's tensors."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    linked: list[BaseException | None] = [error]
    while linked:
        link = linked.pop()
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            linked += [link.__cause__, link.__context__]
    return error


def _quantile(ordered: Sequence[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])

"""Time a call, on a GPU or on the CPU.

On a GPU each sample is the time between two CUDA events around one call, after a buffer larger than
the L2 cache was overwritten, which is what ``triton.testing.do_bench`` (Triton 3.6) measures. That
function is not used itself because it calls ``fn`` at least eight times however long one call takes
(one call, five for an estimate, one warm-up, one sample), has no lower or upper bound on the number
of samples, and cannot alternate between implementations.

Such a time holds the GPU's own work, and the host's time to issue it as far as the flush does not
hide it. ``Timing.ms_host`` is the second by itself, ``a2lib.lab.graphs`` measures the first.

What several ranks do together is timed from where all of them are idle (``from_rest``).
"""

import contextlib
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from a2lib.lab.device import Sensors, synchronize
from a2lib.lab.failures import detached
from a2lib.lab.memory import free_memory
from a2lib.lab.sections import Section

# As triton.testing.do_bench: several times the L2 cache of any GPU there is.
FLUSH_BYTES = 256 * 2**20
# A call this long is not repeated to warm up: its first call is the warm-up.
LONG_MS = 1000.0
# The samples of each implementation are spread over this many turns.
TURNS = 10
# The host's time is that of a few calls in a row from an idle GPU, so few that their launches fit
# the queue (about a thousand): where it is full the host waits for the GPU.
HOST_SHORT_MS = 5.0


class Bursts(NamedTuple):
    """So many calls in a row, so many times."""

    calls: int
    times: int


HOST_SHORT, HOST_OTHERS = Bursts(5, 9), Bursts(1, 3)


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
        """Return the milliseconds of each of ``n`` calls, all of them finished on return."""
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


@dataclass(frozen=True)
class Timing:
    """Hold what ``n`` timed calls of one function took, under the names of the result store.

    - ``ms``, ``ms_p20``, ``ms_p80``: their median and their 20 % and 80 % quantiles, in ms.
    - ``ms_mean``, ``ms_std``, ``ms_min``: their mean, standard deviation and minimum, in ms; None
      where there is no such number, such as the deviation of one sample.
    - ``ms_host``: the median time that the CPU needs to launch one call, in ms; None on the CPU.
    - ``sm_mhz``: the median clock of the SMs while timing; None where the driver does not tell.
    """

    ms: float
    ms_p20: float
    ms_p80: float
    n: int
    ms_host: float | None = None
    sm_mhz: int | None = None
    ms_mean: float | None = field(default=None, compare=False)
    ms_std: float | None = field(default=None, compare=False)
    ms_min: float | None = field(default=None, compare=False)

    @classmethod
    def from_samples(
        cls, samples: Sequence[float], host: Sequence[float] = (), mhz: Sequence[int | None] = ()
    ) -> Self:
        """Summarise ``samples`` (milliseconds, at least one), interpolating linearly.

        ``host`` are samples of the host's time, ``mhz`` readings of the clock, None where one
        failed.
        """
        import numpy as np

        p20, median, p80 = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
        deviation = statistics.stdev(samples) if len(samples) > 1 else 0.0
        return cls(
            ms=median,
            ms_p20=p20,
            ms_p80=p80,
            n=len(samples),
            ms_host=statistics.median(host) if host else None,
            sm_mhz=median_reading(mhz),
            ms_mean=statistics.fmean(samples),
            ms_std=deviation or None,
            ms_min=min(samples),
        )

    def row(self, section: Section) -> dict[str, object]:
        """Return the fields that ``section`` has a column for."""
        return section.columns_of(dataclasses.asdict(self))

    def named(self, name: str) -> dict[str, float]:
        """Return the median and its quantiles as columns of another name than ``ms``."""
        return {name: self.ms, f"{name}_p20": self.ms_p20, f"{name}_p80": self.ms_p80}


def time_call(fn: Callable[[], object], **options: object) -> Timing:
    """Return the Timing of ``fn()``; ``options`` are those of ``time_many``.

    An exception of ``fn`` passes through.
    """
    result = time_many({"fn": fn}, **options)["fn"]
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
    clock: Clock | None = None,
) -> dict[str, Timing | Exception]:
    """Time several functions in alternation, so that a drift of the clock reaches all alike.

    Arguments:

    - ``functions``: a dict of names and functions without arguments. Their results are dropped.
    - ``device``: "cuda" or "cpu".
    - ``warmup_ms``: for how long each function is called before its first sample, after a first
      call that compiles. A function that takes a second or more is called only once.
    - ``rep_ms``, ``min_n``, ``max_n``: for about how long each function is sampled, and at least
      and at most how often.
    - ``clock``: what reads the time (default: CUDA events on a GPU, the CPU's clock without).

    On a GPU, the CPU's time to launch a call is measured after that, in alternation as well.

    Returns a dict from each name to its Timing, or to the exception that the function raised (out
    of memory included). Such a function is left out from there on, and the others go on. The
    exception has its traceback as a note, since the traceback itself would keep the failed call's
    tensors alive.
    """
    clock = clock or Clock(device)
    every, due = {}, {}
    for name, function in functions.items():
        every[name] = series = _Series(function, clock)
        series.attempt(series.warm_up, warmup_ms, max_n)
        if series.failure is None:
            n = sample_count(rep_ms, series.estimate_ms, min_n, max_n)
            due[name] = n - len(series.samples)
    for name, n in in_turns(due):
        every[name].attempt(every[name].sample, n)
    for turn in range(max(HOST_SHORT.times, HOST_OTHERS.times)):
        for series in every.values():
            series.attempt(series.time_host, turn)
    return {name: series.failure or series.timing() for name, series in every.items()}


class _Series:
    """The samples of one function that takes turns with others, or the exception that it raised."""

    def __init__(self, function: Callable[[], object], clock: Clock) -> None:
        self._function, self._clock = function, clock
        self.samples: list[float] = []
        self.estimate_ms = 0.0
        self.failure: Exception | None = None
        self._mhz: list[int | None] = []
        self._host: list[float] = []

    def attempt(self, action: Callable[..., None], *arguments: object) -> None:
        """Call the action, unless the function has failed."""
        if self.failure is not None:
            return
        try:
            action(*arguments)
        except Exception as error:
            self.failure = detached(error)
            # A device broken by the failed call refuses this too; each later one has its own error.
            with contextlib.suppress(Exception):
                self._clock.release()

    def warm_up(self, warmup_ms: float, max_n: int) -> None:
        """Call the function until it takes what it will take, and estimate that."""
        self._clock.samples(self._function, 1)
        (estimate,) = self._clock.samples(self._function, 1)
        if estimate >= LONG_MS:  # counts already
            self.samples, self._mhz = [estimate], [self._clock.sm_mhz]
        else:
            # It may still compile or allocate: it decides how long to warm up, no more.
            calls = max_n if estimate <= 0 else int(min(warmup_ms / estimate, max_n))
            estimate = statistics.median(self._clock.samples(self._function, max(1, calls)))
        self.estimate_ms = estimate

    def sample(self, n: int) -> None:
        self.samples += self._clock.samples(self._function, n)
        self._mhz.append(self._clock.sm_mhz)

    def time_host(self, turn: int) -> None:
        """Measure the host's time in this turn: of short calls more, and more often."""
        is_short = statistics.median(self.samples) < HOST_SHORT_MS
        bursts = HOST_SHORT if is_short else HOST_OTHERS
        if turn < bursts.times:
            taken = self._clock.host(self._function, bursts.calls)
            if taken is not None:
                self._host.append(taken)

    def timing(self) -> Timing:
        return Timing.from_samples(self.samples, self._host, self._mhz)


def in_turns(due: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """``due[name]`` samples of each, as (name, n) over TURNS turns; none where n would be 0.

    The order is another in each turn, the same in each process: what draws much power slows down
    what comes behind it.
    """
    names = list(due)
    for turn in range(TURNS):
        random.Random(turn).shuffle(names)
        for name in names:
            total = due[name]
            n = total * (turn + 1) // TURNS - total * turn // TURNS
            if n > 0:
                yield name, n


def sample_count(rep_ms: float, estimate_ms: float, min_n: int, max_n: int) -> int:
    """Return the calls of ``estimate_ms`` that fill ``rep_ms``, from ``min_n`` to ``max_n``."""
    wanted = max_n if estimate_ms <= 0 else math.ceil(min(rep_ms / estimate_ms, max_n))
    return max(wanted, min_n)


def median_reading(readings: Sequence[float | None]) -> int | None:
    """The median of the readings that succeeded, to the whole number; None where none did."""
    succeeded = []
    for reading in readings:
        if reading is not None:
            succeeded.append(reading)
    return round(statistics.median(succeeded)) if succeeded else None


def meet(device: str) -> None:
    """All ranks at rest, from where they start together; collective."""
    import torch.distributed as dist

    synchronize(device)
    dist.barrier()
    synchronize(device)


def from_rest(run: Callable[[], object], device: str) -> float:
    """Milliseconds of one call by the host's clock, from where all ranks are idle to where this
    one is again; every rank calls it."""
    meet(device)
    start = time.perf_counter_ns()
    run()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6


@dataclass(frozen=True)
class RankTimes:
    """Milliseconds of each call that the ranks took together, a list for each rank; and what the
    host takes to issue one, of the slowest rank, None where it does the work."""

    by_rank: list[list[float]]
    ms_host: float | None = None

    @property
    def slowest(self) -> Timing:
        """Return the times of the slowest rank, call by call."""
        slowest = []
        for times in zip(*self.by_rank, strict=True):
            slowest.append(max(times))
        return Timing.from_samples(slowest)

    def row(self, section: Section) -> dict[str, object]:
        """Return the columns that ``section`` has: the slowest rank's times, the host's, and of
        what the ranks took by themselves, of their medians, the least, the median and the most."""
        medians = list(map(statistics.median, self.by_rank))
        columns = {
            **self.slowest.row(section),
            "ms_host": self.ms_host,
            "ms_rank_min": min(medians),
            "ms_rank_median": statistics.median(medians),
            "ms_rank_max": max(medians),
        }
        return section.columns_of(columns)

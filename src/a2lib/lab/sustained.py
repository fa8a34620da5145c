"""Follow the time of a call while it is repeated without pause, second by second.

Each call is timed as in ``a2lib.lab.timing``, between events and behind a flush of the L2
cache, so that what differs from a short burst is the state of the device: the clock that its power
and temperature leave it.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from a2lib.lab.clock import Clock
from a2lib.lab.timing import Timing

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


def seconds_of(
    call: Callable[[], object],
    *,
    device: str,
    n_seconds: int,
    second_s: float,
    idle_s: float,
    clock: Clock | None = None,
) -> list[Second]:
    """Repeat ``call`` for ``n_seconds`` seconds without pause, after ``idle_s`` seconds of rest.

    ``device`` is "cuda" or "cpu". ``second_s`` makes a second shorter, for a trial. A second in
    which no call began has no entry. An exception of ``call`` passes through.
    """
    clock = clock or Clock(device)
    clock.begin()
    estimate = statistics.median(ms for _, ms in clock.finish(clock.queue(call, WARM_UP_CALLS)))
    n = BATCH_CALLS if estimate <= 0 else max(1, min(BATCH_CALLS, int(BATCH_MS / estimate)))
    time.sleep(idle_s)
    samples, mhz, watts = (defaultdict(list) for _ in range(3))
    clock.begin()
    running, second = clock.queue(call, n), 0
    while second < n_seconds:
        following = clock.queue(call, n)
        done, (now_mhz, now_w) = clock.finish(running), clock.readings()
        for began, ms in done:
            second = int(began / (second_s * 1000))
            samples[second].append(ms)
            mhz[second].append(now_mhz)
            watts[second] += [] if now_w is None else [now_w]
        running = following
    clock.finish(running)
    return [
        Second(
            second,
            Timing.from_samples(samples[second], mhz=mhz[second]),
            statistics.median(watts[second]) if watts[second] else None,
        )
        for second in range(n_seconds)
        if samples[second]
    ]

"""What a call costs the GPU alone: its kernels, captured once and replayed as a CUDA graph.

A replay launches all kernels of a call at once, so that no time of Python, of autograd or of a
launch is in it. Timed as in ``a2lib.lab.timing``: events, the L2 cache flushed before each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from a2lib.lab.clock import Clock
from a2lib.lab.failures import classify, note
from a2lib.lab.timing import Attempts, Timing, in_turns, sample_count
from a2lib.parallel.graphs import CapturedGraph, CudaGraphs, Unusable

REP_MS = 80.0
MIN_N, MAX_N = 3, 300
# A call this short is run twice before its capture, a longer one once.
SHORT_MS = 100.0

Call = Callable[[], object]


@dataclass(frozen=True)
class Replays:
    """Each name's Timing, or the exception that its capture or replay raised.

    Where a failure left the device not ``usable``, names whose time was still to come are missing.
    """

    results: dict[str, Timing | Exception]
    usable: bool = True

    def row(self, name: str) -> dict[str, object]:
        """Return the column ``ms_graph`` of a call, or the ``note`` that says why it has none."""
        result = self.results[name]
        if isinstance(result, Exception):
            return {"note": note(f"no graph: {classify(result)[1]}")}
        return {"ms_graph": result.ms}


def time_replays(
    makers: Mapping[str, Callable[[], Call]],
    expected_ms: Mapping[str, float],
    *,
    max_n: int = MAX_N,
    graphs: CudaGraphs | None = None,
    clock: Clock | None = None,
) -> Replays:
    """Time each call of ``makers`` replayed from a CUDA graph, in turns.

    ``makers[name]()`` returns the call, or a call that holds what it should not time (a graph of
    autograd): it is made anew, on the stream it is captured on. Its inputs must be leaves of its
    own. ``expected_ms`` is about what a call takes; ``max_n`` as in ``timing.time_many``.

    The exceptions returned are without the frames that hold tensors.
    """
    graphs, clock = graphs or CudaGraphs(), clock or Clock("cuda")
    captured: dict[str, CapturedGraph] = {}
    samples: dict[str, list[float]] = {}

    def give_back(*names: str) -> None:
        for name in names:
            with contextlib.suppress(Exception):
                captured.pop(name).release()
        with contextlib.suppress(Exception):
            clock.release()

    def mend(name: str) -> None:
        give_back(name)
        graphs.mend()

    def capture(name: str) -> None:
        calls = 2 if expected_ms[name] < SHORT_MS else 1
        captured[name], samples[name] = graphs.capture(makers[name], calls), []

    def sample(name: str, n: int) -> None:
        samples[name] += clock.samples(captured[name].replay, n)

    attempt = Attempts(mend)
    try:
        for name in makers:
            attempt(capture, name)
        due = {n: sample_count(REP_MS, expected_ms[n], MIN_N, max_n) for n in samples}
        for name, n in in_turns(due):
            attempt(sample, name, n)
    except Unusable:
        return Replays(attempt.failed, usable=False)
    finally:
        give_back(*captured)
    return Replays(
        {name: attempt.failed.get(name) or Timing.from_samples(samples[name]) for name in makers}
    )

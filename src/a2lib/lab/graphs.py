"""Time what a call costs the GPU alone: its kernels, captured once and replayed as a CUDA graph.

for name, columns in time_in_turns(makers, section, device="cuda"):    # by the host, and replayed
    yield {**keys[name], **columns}

A replay launches all kernels of a call at once, so that no time of Python, of autograd or of a
launch is in it. Timed as in ``a2lib.lab.timing``: events, the L2 cache flushed before each.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

from a2lib.lab.clock import Clock
from a2lib.lab.failures import LostContext, classify, failed, is_lost, note, trial
from a2lib.lab.sections import Section
from a2lib.lab.timing import Attempts, Timing, in_turns, sample_count, time_many
from a2lib.parallel.graphs import CapturedGraph, CudaGraphs

REP_MS = 80.0
MIN_N, MAX_N = 3, 300
# A call this short is run twice before its capture, a longer one once.
SHORT_MS = 100.0

Call = Callable[[], object]
Make = Callable[[bool], Call]


class MendedGraphs(CudaGraphs):
    """CUDA graphs captured one after the other, whatever has failed before."""

    def mend(self) -> None:
        """Make the process fit for further work after a failure; LostContext where it is not.

        A trivial capture also ends what the failed one left open in the random generator.
        """
        import torch

        try:
            torch.cuda.synchronize()
            counted = torch.zeros(1, device="cuda")

            def count() -> None:
                counted.add_(1)

            self.capture(lambda: count, 1).release()
            torch.rand(1, device="cuda")
            right = counted.item() == 2  # run once, replayed once
        except Exception as error:
            raise LostContext(f"after a failed CUDA graph: {error}") from error
        if not right:
            raise LostContext("after a failed CUDA graph a captured addition gives a wrong sum")


def graph_columns(result: Timing | Exception) -> dict[str, object]:
    """Return the column ``ms_graph`` of a replay, or the ``note`` that says why there is none."""
    if isinstance(result, Exception):
        return {"note": note(f"no graph: {classify(result)[1]}")}
    return {"ms_graph": result.ms}


def time_replays(
    makers: Mapping[str, Callable[[], Call]],
    expected_ms: Mapping[str, float],
    *,
    max_n: int = MAX_N,
    graphs: MendedGraphs | None = None,
    clock: Clock | None = None,
) -> dict[str, Timing | Exception]:
    """Time each call of ``makers`` replayed from a CUDA graph, in turns; return each name's Timing,
    or the exception that its capture or replay raised.

    ``makers[name]()`` returns the call, or a call that holds what it should not time (a graph of
    autograd): it is made anew, on the stream it is captured on. Its inputs must be leaves of its
    own. ``expected_ms`` is about what a call takes; ``max_n`` as in ``timing.time_many``.

    The exceptions returned are without the frames that hold tensors. Raises LostContext where one
    left the device of no use.
    """
    graphs, clock = graphs or MendedGraphs(), clock or Clock("cuda")
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
        due = {}
        for name in samples:
            due[name] = sample_count(REP_MS, expected_ms[name], MIN_N, max_n)
        for name, n in in_turns(due):
            attempt(sample, name, n)
    finally:
        give_back(*captured)
    return attempt.results(makers, lambda name: Timing.from_samples(samples[name]))


def time_in_turns(
    makers: Mapping[str, Make], section: Section, *, device: str, **timing: float
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the name of each call and the columns that ``section`` has of its times.

    ``makers[name](False)`` returns the call that the host makes. On a GPU ``makers[name](True)``
    returns the same on leaves of its own, for a CUDA graph: autograd hands a leaf its gradient on
    the stream that first used it, and a capture sees one stream. ``timing`` as in ``time_many``.

    A call that fails has a status and a note; one that cannot be captured has its times, and says
    why in its note. Raises LostContext where the device is of no use any more: those that have no
    row yet are to be measured in another process, each alone, so that no row blames the wrong one.
    """
    calls = {}
    for name, make in makers.items():
        with trial() as failure:
            calls[name] = make(False)
        if failure:
            yield name, failure
    results = time_many(calls, device=device, **timing) if calls else {}
    calls.clear()  # and what they hold
    times: dict[str, Timing] = {}
    for name, result in results.items():
        if isinstance(result, Timing):
            times[name] = result
        elif is_lost(result):
            raise LostContext(f"in {name}, or in another that took turns: {result}")
        else:
            yield name, failed(result)
    if device == "cpu" or not times:
        for name, time in times.items():
            yield name, time.row(section)
        return
    captured = {name: functools.partial(makers[name], True) for name in times}
    replays = time_replays(captured, {name: time.ms for name, time in times.items()})
    for name, result in replays.items():
        yield name, {**times[name].row(section), **graph_columns(result)}

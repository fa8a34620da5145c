"""Time what a call costs the GPU alone: its kernels, captured once and replayed as a CUDA graph.

for name, columns in time_in_turns(makers, section, device="cuda"):    # by the host, and replayed
    yield {**keys[name], **columns}

A replay launches all kernels of a call at once, so that no time of Python, of autograd or of a
launch is in it. Timed as in ``a2lib.lab.timing``: events, the L2 cache flushed before each. After a
capture that fails a process is fit for nothing more: LostContext ends it, and the sweep goes on in
a new one.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from a2lib.lab.failures import LostContext, classify, failed, is_lost, note, trial
from a2lib.lab.sections import Section
from a2lib.lab.timing import Clock, Timing, in_turns, sample_count, time_many

if TYPE_CHECKING:
    from a2lib.parallel.graphs import CapturedGraph, CudaGraphs

REP_MS = 80.0
MIN_N, MAX_N = 3, 300
# A call this short is run twice before its capture, a longer one once.
SHORT_MS = 100.0

Call = Callable[[], object]
Make = Callable[[bool], Call]


class NoGraph(LostContext):
    """The call ``name`` could not be captured or replayed; ``columns`` says why in its row."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"no graph of {name}: {error}")
        self.name, self.columns = name, {"note": note(f"no graph: {classify(error)[1]}")}


def time_replays(
    makers: Mapping[str, Callable[[], Call]],
    expected_ms: Mapping[str, float],
    *,
    max_n: int = MAX_N,
    graphs: CudaGraphs | None = None,
    clock: Clock | None = None,
) -> dict[str, Timing]:
    """Time each call of ``makers`` replayed from a CUDA graph, in turns; return each name's Timing.

    ``makers[name]()`` returns the call, or a call that holds what it should not time (a graph of
    autograd): it is made anew, on the stream it is captured on. Its inputs must be leaves of its
    own. ``expected_ms`` is about what a call takes; ``max_n`` as in ``timing.time_many``.

    Raises NoGraph for the first that cannot be captured or replayed.
    """
    from a2lib.parallel.graphs import CudaGraphs

    graphs, clock = graphs or CudaGraphs(), clock or Clock("cuda")
    captured: dict[str, CapturedGraph] = {}
    samples: dict[str, list[float]] = defaultdict(list)
    due: dict[str, int] = {}
    name = ""
    try:
        for name, make in makers.items():
            calls = 2 if expected_ms[name] < SHORT_MS else 1
            captured[name] = graphs.capture(make, calls)
            due[name] = sample_count(REP_MS, expected_ms[name], MIN_N, max_n)
        for name, n in in_turns(due):
            samples[name] += clock.samples(captured[name].replay, n)
    except Exception as error:
        raise NoGraph(name, error) from error
    for graph in captured.values():
        graph.release()
    clock.release()
    return {name: Timing.from_samples(taken) for name, taken in samples.items()}


def time_in_turns(
    makers: Mapping[str, Make], section: Section, *, device: str, **timing: float
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the name of each call and the columns that ``section`` has of its times.

    ``makers[name](False)`` returns the call that the host makes. On a GPU ``makers[name](True)``
    returns the same on leaves of its own, for a CUDA graph: autograd hands a leaf its gradient on
    the stream that first used it, and a capture sees one stream. ``timing`` as in ``time_many``.

    A call that fails has a status and a note; one that cannot be captured has its times, and says
    why in its note. Raises LostContext behind that one, or where the device is of no use any more:
    those that have no row yet are to be measured in another process, each alone, so that no row
    blames the wrong one.
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
    replays: dict[str, Timing] = {}
    if device == "cuda" and times:
        captured, expected_ms = {}, {}
        for name, time in times.items():
            captured[name] = functools.partial(makers[name], True)
            expected_ms[name] = time.ms
        try:
            replays = time_replays(captured, expected_ms)
        except NoGraph as lost:
            yield lost.name, {**times[lost.name].row(section), **lost.columns}
            raise
    for name, time in times.items():
        columns = time.row(section)
        if name in replays:
            columns["ms_graph"] = replays[name].ms
        yield name, columns

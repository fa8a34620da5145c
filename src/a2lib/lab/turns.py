"""Several calls in one process, timed in turns: by the host, and replayed from CUDA graphs.

for name, columns in time_in_turns(makers, section, device="cuda"):
    yield {**keys[name], **columns}
"""

import functools
from collections.abc import Callable, Iterator, Mapping

from a2lib.lab.failures import LostContext, failed, is_lost, trial
from a2lib.lab.graphs import time_replays
from a2lib.lab.sections import Section
from a2lib.lab.timing import Timing, time_many

Make = Callable[[bool], Callable[[], object]]


def time_in_turns(
    makers: Mapping[str, Make], section: Section, *, device: str, **timing: float
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the name of each call and the columns that ``section`` has of its times.

    ``makers[name](False)`` returns the call that the host makes. On a GPU ``makers[name](True)``
    returns the same on leaves of its own, for a CUDA graph: autograd hands a leaf its gradient on
    the stream that first used it, and a capture sees one stream. ``timing`` as in ``time_many``.

    A call that fails has a status and a note; one that cannot be captured has its times, and says
    why in its note. Raises LostContext where the device has to be reset: those that have no row yet
    are to be measured in another process, each alone, so that no row blames the wrong one.
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
    for name in replays.results:
        yield name, {**times[name].row(section), **replays.row(name)}
    if not replays.usable:
        raise LostContext("a failed CUDA graph")

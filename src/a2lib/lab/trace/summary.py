"""Of a table of kernels: time by name, what could not be filed, and the rows of two small tables;
of each phase of each step: how long the GPU was at it, and what the host did meanwhile.

    for step, phases in phase_times(read("report.sqlite")).items():
        phases["forward"].span_ns, phases["step"].range_ns

A phase's kernels run after its range: the host pushes and pops the range while it launches, and is
ahead of the GPU by as much as it can. So the range's length is the host's time, and the time from
the first kernel's start to the last one's end is the GPU's; where they differ, neither is wrong.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from a2lib.lab.trace.classes import OTHER, shorten
from a2lib.lab.trace.kernels import PHASES, Kernel, Span, Trace, covered_ns

STEP = "step"  # the whole of one
HOST = "host"
ROWS = 1500
NEIGHBOURS_NS = 2000  # kernels of one kind and range that are no further apart are drawn as one


@dataclass(frozen=True)
class Coverage:
    """Shares of kernel time, 0 to 1: launches that were not found, launches outside any range,
    names that no rule knows. And of the latter the longest."""

    no_launch: float
    no_range: float
    no_class: float
    unknown: tuple[str, ...]


def by_name(kernels: Iterable[Kernel]) -> Counter[str]:
    """Nanoseconds of all kernels of a name."""
    found: Counter[str] = Counter()
    for kernel in kernels:
        found[kernel.name] += kernel.duration_ns
    return found


def busy(kernels: Iterable[Kernel]) -> tuple[int, int]:
    """Nanoseconds from the first kernel's start to the last one's end, and how long at least one of
    a device ran; streams overlap, so this is no sum. Several devices add up; 0, 0 for no kernels.
    """
    devices: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for kernel in kernels:
        devices[kernel.device].append((kernel.start_ns, kernel.end_ns))
    span = sum(max(b for _, b in one) - min(a for a, _ in one) for one in devices.values())
    return span, sum(map(covered_ns, devices.values()))


def coverage(kernels: list[Kernel]) -> Coverage:
    """What of the time could not be filed."""
    everything = sum(k.duration_ns for k in kernels) or 1

    def share(chosen: Iterable[Kernel]) -> float:
        return sum(k.duration_ns for k in chosen) / everything

    strange = [k for k in kernels if k.kind == OTHER]
    longest = sorted(by_name(strange).items(), key=lambda one: (-one[1], one[0]))
    return Coverage(
        share(k for k in kernels if k.launch is None),
        share(k for k in kernels if k.launch is not None and not k.path),
        share(strange),
        tuple(name for name, _ in longest[:5]),
    )


def kernel_rows(kernels: list[Kernel], least_share: float = 0.001) -> list[dict[str, object]]:
    """Rows of the bulk table ``kernels``: phase, part, kind, kernel, calls, ms, median_us, share.

    A kernel below ``least_share`` of all time is filed under "rest" of its phase, part and kind, so
    that the sums stay exact.
    """
    time = by_name(kernels)
    everything = time.total() or 1
    groups: dict[tuple, list[int]] = {}
    for k in kernels:
        name = shorten(k.name) if time[k.name] / everything >= least_share else "rest"
        groups.setdefault((k.phase, k.part, k.kind, name), []).append(k.duration_ns)
    return [
        {
            **dict(zip(("phase", "part", "kind", "kernel"), where, strict=True)),
            "calls": len(ns),
            "ms": sum(ns) / 1e6,
            "median_us": statistics.median(ns) / 1e3,
            "share": sum(ns) / everything,
        }
        for where, ns in sorted(groups.items(), key=lambda group: -sum(group[1]))
    ]


def strip_rows(
    kernels: Iterable[Kernel], start_ns: int = 0, length_ns: int | None = None, rows: int = ROWS
) -> list[dict[str, object]]:
    """Rows of the bulk table ``strip``: start_us and duration_us in the window, stream, kind,
    phase, part; and the launches as rows of the stream "host".

    The window begins at ``start_ns`` of the trace. Neighbours on a stream with equal kind, phase
    and part are one row where the gap is small; if there are still more than ``rows``, the window
    ends earlier.
    """
    end_ns = float("inf") if length_ns is None else start_ns + length_ns
    kernels = list(kernels)
    pieces = [(k.start_ns, k.end_ns, k.stream, k) for k in kernels]
    for k in kernels:
        # An operator on a CPU is its own launch.
        if k.launch is not None and k.launch.start_ns != k.start_ns:
            pieces.append((k.launch.start_ns, k.launch.end_ns, HOST, k))
    found: list[list] = []
    last: dict[str, list] = {}  # stream -> its last row, the only one that may grow
    for start, end, stream, k in sorted(pieces, key=lambda piece: piece[:3]):
        start, end = max(start, start_ns), min(end, end_ns)
        if start >= end:
            continue
        what, before = [stream, k.kind, k.phase, k.part], last.get(stream)
        if before and before[2:] == what and start - before[1] <= NEIGHBOURS_NS:
            before[1] = max(before[1], end)
            continue
        last[stream] = [start, end, *what]
        found.append(last[stream])
    names = ("stream", "kind", "phase", "part")
    return [
        {
            "start_us": (start - start_ns) / 1e3,
            "duration_us": (end - start) / 1e3,
            **dict(zip(names, what, strict=True)),
        }
        for start, end, *what in found[:rows]
    ]


@dataclass(frozen=True)
class PhaseTimes:
    """Nanoseconds of one phase of one step.

    ``span_ns`` runs from its first kernel's start to its last one's end, ``busy_ns`` is how long at
    least one of them ran. ``range_ns`` is the length of its range on the host, of which
    ``launching_ns`` was spent in the calls that launch and ``waiting_ns`` in those that wait for
    the device. ``queued_ns`` is the median time from the end of a launch to its kernel's start: how
    far the host is ahead. The last three are 0 where there are no kernels but operators.
    """

    kernels: int
    span_ns: int
    busy_ns: int
    range_ns: int
    launching_ns: int
    waiting_ns: int
    queued_ns: float


def phase_times(trace: Trace) -> dict[str, dict[str, PhaseTimes]]:
    """Step -> phase -> its times, and those of the whole ``STEP``; {} where no step is named."""
    on_cpu = trace.source == "chrome, cpu"
    waits = () if on_cpu else trace.waits
    found = {}
    for step, kernels in trace.steps().items():
        (around, *_) = [span for span in trace.spans if span.name == step]
        inside = [
            s
            for s in trace.spans
            if s.thread == around.thread
            and around.start_ns <= s.start_ns
            and s.end_ns <= around.end_ns
        ]
        phases = {}
        for phase in PHASES:
            mine = [k for k in kernels if k.phase == phase]
            ranges = [s for s in inside if s.name == phase]
            if mine and ranges:
                phases[phase] = _times(mine, ranges, waits, on_cpu)
        found[step] = phases | {STEP: _times(kernels, [around], waits, on_cpu)}
    return found


def _times(
    kernels: list[Kernel], ranges: list[Span], waits: Iterable[Span], on_cpu: bool
) -> PhaseTimes:
    span_ns, busy_ns = busy(kernels)
    # A replayed graph is one launch of many kernels.
    launches = set() if on_cpu else {k.launch for k in kernels if k.launch is not None}
    queued = [max(0, k.start_ns - k.launch.end_ns) for k in kernels if k.launch in launches]
    waited = [w for w in waits for r in ranges if r.start_ns <= w.start_ns < r.end_ns]
    return PhaseTimes(
        kernels=len(kernels),
        span_ns=span_ns,
        busy_ns=busy_ns,
        range_ns=sum(r.end_ns - r.start_ns for r in ranges),
        launching_ns=sum(launch.end_ns - launch.start_ns for launch in launches),
        waiting_ns=sum(w.end_ns - w.start_ns for w in waited),
        queued_ns=statistics.median(queued) if queued else 0,
    )

"""From kernels to the rows of two small tables: all of a step's kernels, and a strip of it."""

import statistics
from collections.abc import Iterable

from a2lib.measure.trace.classes import shorten
from a2lib.measure.trace.kernels import Kernel
from a2lib.measure.trace.summary import by_name

HOST = "host"
ROWS = 1500
NEIGHBOURS_NS = 2000  # kernels of one kind and range that are no further apart are drawn as one


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
            start = k.launch.start_ns
            pieces.append((start, start + k.launch.duration_ns, HOST, k))
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

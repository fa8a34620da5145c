"""From a trace to the small tables that are kept of it."""

from __future__ import annotations

from a2lib.measure.trace import Kernel, Trace, TraceError, busy, kernel_rows, strip_rows

LEAST_SHARE = 0.001  # of a step's kernel time; what takes less is filed under "rest"


def median_step(found: Trace) -> list[Kernel]:
    """The kernels of the step whose busy time is the median one (the lower of two).

    Raises TraceError where the trace names no step.
    """
    steps = sorted(found.steps().values(), key=lambda kernels: busy(kernels).busy_ns)
    if not steps:
        raise TraceError("the trace names no step")
    return steps[(len(steps) - 1) // 2]


def differing(found: Trace) -> str:
    """What to say where steps that do the same have another number of kernels, or of ranges; ""
    where not. A profiler that lost records shows so."""
    around = [span for span in found.spans if span.name in found.steps()]
    counts = {
        "kernels": [len(kernels) for kernels in found.steps().values()],
        # Of all threads: the backward pushes its own.
        "ranges": [sum(step.start_ns <= span.start_ns < step.end_ns for span in found.spans)
                   for step in around],
    }  # fmt: skip
    return "; ".join(f"steps of {min(n)} to {max(n)} {what}"
                     for what, n in counts.items() if len(set(n)) > 1)  # fmt: skip


def kernel_table(step: list[Kernel]) -> list[dict[str, object]]:
    """Rows of the bulk table ``kernels`` of one step."""
    return kernel_rows(step, LEAST_SHARE)


def block_windows(found: Trace, step: list[Kernel], layers: int) -> dict[str, list]:
    """Phase -> rows of the bulk table ``strip``: the block in the middle, forward and backward.

    It is found by its range. Where blocks have none, since they are compiled, the window is as long
    as one of ``layers`` equal parts in the middle of the phase.
    """
    windows = {}
    for phase, suffix in (("forward", ""), ("backward", ".bwd")):
        mine = [k for k in step if k.phase == phase]
        if not mine:
            continue
        block = f"layers.{layers // 2}{suffix}"
        inside = [k for k in mine if block in k.path]
        if inside:
            start, end = min(k.start_ns for k in inside), max(k.end_ns for k in inside)
        else:
            first, last = min(k.start_ns for k in mine), max(k.end_ns for k in mine)
            length = (last - first) // layers
            start = first + (layers // 2) * length
            end = start + length
        rows = strip_rows(found.kernels, start, end - start)
        if rows:
            windows[phase] = rows
    return windows

"""A window of a step of several ranks as rank 0's GPU saw it, by torch.profiler: what ran beside
what.

    trace = record(step, device)                 # by every rank; None on the others
    rows = around_end_of_backward(trace)         # of the bulk table "strip"
"""

from collections.abc import Callable
from contextlib import nullcontext

from a2lib.lab.device import synchronize
from a2lib.lab.kernel_names import COMMUNICATION, MATMUL
from a2lib.lab.steps import Phase
from a2lib.lab.trace import HOST, Kernel, Trace, TraceError, from_profiler, strip_rows

ROWS = 1500
MS = 1_000_000  # nanoseconds


def record(step: Callable[[Phase], object], device: str, steps: int = 2) -> Trace | None:
    """Take steps on every rank, each as `step(phase)`; return rank 0's trace of them, None on the
    other ranks."""
    import torch
    import torch.distributed as dist

    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    here = dist.get_rank() == 0
    profiler = torch.profiler.profile(activities=activities) if here else None
    with profiler or nullcontext():
        for _ in range(steps):
            step(torch.profiler.record_function if here else nullcontext)
        synchronize(device)
    return from_profiler(profiler) if here else None


def around_end_of_backward(trace: Trace, captured: bool = False) -> list[dict[str, object]]:
    """Return the rows of 15 ms before and after the end of the last backward. Of a step that is
    `captured` no phase is known: it ends with the last product then. Raises TraceError where there
    is no backward."""
    if captured:
        backward = [kernel for kernel in trace.kernels if kernel.kind == MATMUL]
        if not backward:
            raise TraceError("no product was traced")
    else:
        backward = last_backward(trace)
    end = max(kernel.end_ns for kernel in backward)
    return strip(trace, end - 15 * MS, 30 * MS)


def around_begin_of_backward(trace: Trace) -> list[dict[str, object]]:
    """Return the rows of 12 ms before and after the begin of the last backward. Raises TraceError
    where there is none."""
    begin = min(kernel.start_ns for kernel in last_backward(trace))
    return strip(trace, begin - 12 * MS, 24 * MS)


def last_backward(trace: Trace) -> list[Kernel]:
    """Return what the last step computes in backward. Raises TraceError where that is nothing."""
    backward = []
    for kernel in trace.kernels:
        if kernel.phase == "backward" and kernel.kind != COMMUNICATION:
            backward.append(kernel)
    if not backward:
        raise TraceError("no kernel of a backward was traced")
    begun = max(span.start_ns for span in trace.ranges if span.name == "backward")
    last = [k for k in backward if k.launch is None or k.launch.start_ns >= begun]
    return last or backward


def strip(trace: Trace, start_ns: int, length_ns: int) -> list[dict[str, object]]:
    """Return rows of the bulk table "strip" from a moment on, without those of the host."""
    rows = strip_rows(trace.kernels, max(0, start_ns), length_ns, most=100 * ROWS)
    return [row for row in rows if row["stream"] != HOST][:ROWS]

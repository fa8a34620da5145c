"""Launched steps as rank 0's GPU saw them, by torch.profiler."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from a2lib.experiments.data_parallel.training import Training
from a2lib.measure import synchronize, trace
from a2lib.measure.trace.classes import COMMUNICATION
from a2lib.measure.trace.kernels import Kernel, Trace
from a2lib.measure.trace.window import HOST

ROWS = 1500


def record(
    training: Training, here: bool, step: Callable[[], object] | None = None
) -> Trace | None:
    """The trace of two steps, where it is to be taken ``here``; every rank takes them. ``step`` is
    another one than the training's, a replay of it."""
    step = step or (lambda: training.step(send=True))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if training.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities) if here else None
    training.ranges = torch.profiler.record_function if here else contextlib.nullcontext
    try:
        with profiler or contextlib.nullcontext():
            for _ in range(2):
                step()
            synchronize(training.device)
    finally:
        training.ranges = contextlib.nullcontext
    if profiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="a2lib-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return trace.read(path)


def last_backward(found: Trace) -> list[Kernel]:
    """What the last of the steps computes in backward; raises TraceError where that is nothing."""
    backward = [k for k in found.kernels if k.phase == "backward" and k.kind != COMMUNICATION]
    if not backward:
        raise trace.TraceError("no kernel of a backward was traced")
    begun = max(span.start_ns for span in found.spans if span.name == "backward")
    return [k for k in backward if k.launch is None or k.launch.start_ns >= begun] or backward


def strip(found: Trace, start_ns: int, length_ns: int) -> list[dict[str, object]]:
    """Rows of the bulk table ``strip`` from a moment on, without those of the host."""
    rows = trace.strip_rows(found.kernels, max(0, start_ns), length_ns, rows=100 * ROWS)
    return [row for row in rows if row["stream"] != HOST][:ROWS]

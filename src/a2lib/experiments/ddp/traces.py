"""A launched step as rank 0's GPU saw it: what ran beside what, around the end of backward."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from a2lib.experiments.data_parallel.training import Training
from a2lib.experiments.ddp.configurations import BEST_MB, Way
from a2lib.experiments.ddp.wrappers import wrap
from a2lib.experiments.harness.ranks import RankJob
from a2lib.measure import bulk, synchronize, trace
from a2lib.measure.trace.classes import COMMUNICATION
from a2lib.measure.trace.kernels import Trace
from a2lib.measure.trace.window import HOST

TRACED = (
    Way("naive"),
    Way("overlapped"),
    Way("bucketed", BEST_MB),
    Way("bucketed", BEST_MB, "copy_engines"),
)
# Of one model, since a profiler leaves the processes slower, which the next task has too.
MODELS = ("xl25", "tiny")
# Nanoseconds of a picture, and of it before backward's end.
LENGTH, BEFORE = 30_000_000, 15_000_000
WARMUP = 3  # the first of them agrees on an order
ROWS = 1500


def draw(job: RankJob, training: Training, way: Way, key: Mapping[str, object]) -> None:
    """Store the bulk table ``strip`` of a step; collective. What fails is told, and is no row."""
    with training.wrapped(lambda model: wrap(model, way)):
        for _ in range(WARMUP):
            training.step(send=True)
        try:
            rows = window(record(training, job.rank == 0))
            if rows and job.rank == 0:
                name = f"ddp-{key['model']}-{way.label}".replace(" ", "-")
                about, where = {"section": "ddp", **key}, {"run": job.run, "data": job.store.data}
                bulk.put("strip", job.store.device, name, rows, about=about, **where)
        except trace.TraceError as error:
            job.failed(f"{way.label}: {error}")


def record(training: Training, here: bool) -> Trace | None:
    """The trace of two steps, where it is to be taken ``here``; every rank takes them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if training.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities) if here else None
    training.ranges = torch.profiler.record_function if here else contextlib.nullcontext
    try:
        with profiler or contextlib.nullcontext():
            for _ in range(2):
                training.step(send=True)
            synchronize(training.device)
    finally:
        training.ranges = contextlib.nullcontext
    if profiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="a2lib-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return trace.read(path)


def window(found: Trace | None) -> list[dict[str, object]]:
    """Rows of the bulk table ``strip`` around the end of the last backward; [] without a trace."""
    if found is None:
        return []
    backward = [k for k in found.kernels if k.phase == "backward" and k.kind != COMMUNICATION]
    if not backward:
        raise trace.TraceError("no kernel of a backward was traced")
    end = max(k.end_ns for k in backward)
    rows = trace.strip_rows(found.kernels, max(0, end - BEFORE), LENGTH, rows=100 * ROWS)
    return [row for row in rows if row["stream"] != HOST][:ROWS]

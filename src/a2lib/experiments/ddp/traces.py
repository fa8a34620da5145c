"""A step as rank 0's GPU saw it: what ran beside what, around the end of backward."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from a2lib.experiments.data_parallel.configurations import unusual
from a2lib.experiments.data_parallel.traces import last_backward, record, strip
from a2lib.experiments.data_parallel.training import Training
from a2lib.experiments.ddp.configurations import BEST_MB, Way
from a2lib.experiments.ddp.wrappers import wrap
from a2lib.experiments.harness.ranks import RankJob
from a2lib.measure import bulk, trace
from a2lib.measure.trace.classes import MATMUL
from a2lib.measure.trace.kernels import Trace
from a2lib.parallel import capture_step

# By whether the step is captured.
TRACED = {
    False: (
        Way("naive"),
        Way("overlapped"),
        Way("bucketed", BEST_MB),
        Way("bucketed", BEST_MB, "copy_engines"),
    ),
    True: (Way("bucketed", BEST_MB), Way("bucketed", BEST_MB, "copy_engines")),
}
# Of one model, since a profiler leaves the processes slower, which the next task has too. What has
# another precision, attention or compilation is a sweep by itself.
MODELS = ("xl25", "tiny")
# Nanoseconds of a picture, and of it before backward's end.
LENGTH, BEFORE = 30_000_000, 15_000_000
WARMUP = 3  # the first of them agrees on an order


def drawn(spec: Mapping[str, object], device: str) -> tuple[Way, ...]:
    """Those ways of a training whose steps are drawn."""
    if spec["model"] in MODELS or unusual(spec, device):
        return TRACED[bool(spec["capture"])]
    return ()


def draw(job: RankJob, training: Training, way: Way, key: Mapping[str, object]) -> None:
    """Store the bulk table ``strip`` of a step; collective. What fails is told, and is no row."""
    captured = bool(key["capture"])
    with training.wrapped(lambda model: wrap(model, way)), contextlib.ExitStack() as held:
        step = lambda: training.step(send=True)  # noqa: E731
        for _ in range(WARMUP):
            step()
        if captured:
            step = held.enter_context(capture_step(step)).replay
        try:
            rows = window(record(training, job.rank == 0, step), captured)
            if rows and job.rank == 0:
                how = way.label, "captured" * captured, unusual(key, job.device)
                words = "ddp", key["model"], *filter(None, how), job.world_size, "ranks"
                name = "-".join(map(str, words)).replace(" ", "-")
                about, where = {"section": "ddp", **key}, {"run": job.run, "data": job.store.data}
                bulk.put("strip", job.store.device, name, rows, about=about, **where)
        except trace.TraceError as error:
            job.failed(f"{way.label}: {error}")


def window(found: Trace | None, captured: bool = False) -> list[dict[str, object]]:
    """Rows of the bulk table ``strip`` around the end of the last backward; [] without a trace. No
    phase is known of what is ``captured``: it ends with the last product then."""
    if found is None:
        return []
    if captured:
        backward = [k for k in found.kernels if k.kind == MATMUL]
        if not backward:
            raise trace.TraceError("no product was traced")
    else:
        backward = last_backward(found)
    end = max(k.end_ns for k in backward)
    return strip(found, end - BEFORE, LENGTH)

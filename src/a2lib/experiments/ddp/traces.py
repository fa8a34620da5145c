"""A launched step as rank 0's GPU saw it: what ran beside what, around the end of backward."""

from __future__ import annotations

from collections.abc import Mapping

from a2lib.experiments.data_parallel.traces import last_backward, record, strip
from a2lib.experiments.data_parallel.training import Training
from a2lib.experiments.ddp.configurations import BEST_MB, Way
from a2lib.experiments.ddp.wrappers import wrap
from a2lib.experiments.harness.ranks import RankJob
from a2lib.measure import bulk, trace
from a2lib.measure.trace.kernels import Trace

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


def draw(job: RankJob, training: Training, way: Way, key: Mapping[str, object]) -> None:
    """Store the bulk table ``strip`` of a step; collective. What fails is told, and is no row."""
    with training.wrapped(lambda model: wrap(model, way)):
        for _ in range(WARMUP):
            training.step(send=True)
        try:
            rows = window(record(training, job.rank == 0))
            if rows and job.rank == 0:
                name = f"ddp-{key['model']}-{way.label}-{job.world_size}-ranks".replace(" ", "-")
                about, where = {"section": "ddp", **key}, {"run": job.run, "data": job.store.data}
                bulk.put("strip", job.store.device, name, rows, about=about, **where)
        except trace.TraceError as error:
            job.failed(f"{way.label}: {error}")


def window(found: Trace | None) -> list[dict[str, object]]:
    """Rows of the bulk table ``strip`` around the end of the last backward; [] without a trace."""
    if found is None:
        return []
    end = max(k.end_ns for k in last_backward(found))
    return strip(found, end - BEFORE, LENGTH)

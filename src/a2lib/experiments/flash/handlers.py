"""What a worker does for the sections of attention."""

from __future__ import annotations

from collections.abc import Callable

from a2lib.experiments.flash import accuracy, counting, peers, protocols
from a2lib.experiments.flash.comparison import Comparison
from a2lib.experiments.flash.shapes import Shape
from a2lib.experiments.harness.worker import Job
from a2lib.measure import failures, synchronize

prepare = peers.configure


def compare(job: Job) -> None:
    """The implementations at one shape."""
    Comparison(
        Shape(**job.spec["shape"]),
        {name: tuple(key["pass"] for key in keys) for name, keys in job.wanted.items()},
        job.device,
        job.put,
        announce=job.begin,
        expired=job.expired,
        in_turns=job.in_turns,
        seed=job.seed,
    ).run()


def protocol(job: Job) -> None:
    """One measurement by one protocol."""
    _whole(job, protocols.measure)


def error(job: Job) -> None:
    """The errors of one implementation against float64."""
    _whole(job, accuracy.measure)


def count(job: Job) -> None:
    """The kernels of one shape; another process runs them, under the profiler."""
    _whole(job, counting.measure)


def compile_(job: Job) -> None:
    """Run one implementation forward and backward, so that its code is in the caches on disk."""
    import torch

    try:
        shape = Shape(**job.spec["shape"])
        torch._dynamo.reset()
        q, k, v, do = peers.inputs(shape, job.device, job.seed)
        o = peers.build(job.spec["implementation"], shape, job.device)(q, k, v)
        torch.autograd.grad(o, (q, k, v), do)
        synchronize(job.device)
    except Exception as error:
        # Measuring meets the same error and makes the row.
        job.failed(failures.note(str(error)))
        if failures.is_lost(error):
            raise failures.LostContext("CUDA error") from error


def _whole(job: Job, measure: Callable) -> None:
    import torch

    torch._dynamo.reset()
    for row in measure(job.spec, job.device, job.seed):
        job.put(row)

"""What a worker does for the section of checkpointing: one model, one strategy after another.

Memory is PyTorch's count of what tensors occupy, without the workspaces that cuBLAS keeps.
"""

import contextlib
import statistics
from collections.abc import Iterator

import torch

from a2lib.experiments.checkpointing import WARMUP, Setting
from a2lib.experiments.harness.worker import Job, Row, free_memory
from a2lib.experiments.workload.ranges import Ranges, Stopwatch
from a2lib.experiments.workload.result import StepTimes
from a2lib.experiments.workload.run import float32_products
from a2lib.experiments.workload.workload import Workload
from a2lib.lab import CHECKPOINTING, Timing
from a2lib.lab.failures import detached
from a2lib.lab.memory import allocated_bytes, take_workspaces


def measure(job: Job) -> None:
    """Steps of one model under each strategy that is wanted; the model and AdamW's moments stay."""
    setting = Setting(**job.spec["setting"])
    take_workspaces(job.device)
    empty = allocated_bytes(job.device)
    with float32_products(setting.precision):
        workload = Workload(setting.config(job.device, seed=job.seed), job.device)
        for (key,) in job.each():
            try:
                workload.model.use_checkpointing(key["strategy"])
                row = _measured(workload, job.device, job.spec["steps"], empty)
            except Exception as error:
                job.fail(detached(error), [key])
            else:
                job.put({**key, **row})
            workload.drop_gradients()
            free_memory(job.device)


def _measured(workload: Workload, device: str, steps: int, empty: int) -> Row:
    stopwatch = Stopwatch(device, Ranges(None))
    for i in range(WARMUP):
        _step(workload, stopwatch, f"warmup {i}")
    found = [_step(workload, stopwatch, f"step {i}") for i in range(steps)]
    timing = Timing.from_samples([times.total_ms for times, _ in found])
    row: Row = {"status": "ok", **timing.row(CHECKPOINTING)}
    for phase in ("forward", "backward"):
        row[f"ms_{phase}"] = statistics.median(times.ms[phase] for times, _ in found)
    if device == "cpu":
        return row
    every = [memory for _, memory in found]
    last = every[-1]
    row |= {
        "held_bytes": last["held"] - empty,
        "kept_bytes": last["kept"] - last["held"],
        "peak_bytes": last["peak"] - last["held"],
        "reserved_bytes": last["reserved"],
    }
    apart = max(one["peak"] for one in every) - min(one["peak"] for one in every)
    return row | ({"note": f"peaks of the steps are {apart} bytes apart"} if apart else {})


def _step(workload: Workload, stopwatch: Stopwatch, name: str) -> tuple[StepTimes, dict[str, int]]:
    """One step's times and, on a GPU, its memory: what is ``held`` before it, what is there when
    the loss is (``kept``), the ``peak``, and what the allocator then holds (``reserved``)."""
    device = workload.device
    memory = {"held": allocated_bytes(device)}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    @contextlib.contextmanager
    def phase(part: str) -> Iterator[None]:
        with stopwatch.phase(part):
            yield
        memory[part] = allocated_bytes(device)

    with stopwatch.step(name) as done:
        loss = workload.work(phase)
    del loss
    memory["kept"] = memory["loss"]
    if device == "cuda":
        memory["peak"] = torch.cuda.max_memory_allocated()
        memory["reserved"] = torch.cuda.max_memory_reserved()
    workload.drop_gradients()
    return done[0], memory

"""What each rank does for the sections of fully sharded data parallel: one task is one training.

``measure`` times each way in turns with the step of one GPU, the same model whole on every rank
with nothing sent. ``memory`` has each way alone in its processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch

from a2lib.experiments.data_parallel import traces
from a2lib.experiments.data_parallel.training import Training
from a2lib.experiments.data_parallel.turns import WARMUP, in_turns, on_stream
from a2lib.experiments.fsdp import gathers
from a2lib.experiments.fsdp.configurations import MOMENTS, OURS, STEADY
from a2lib.experiments.fsdp.gradients import TOLERANCE, worst
from a2lib.experiments.fsdp.wrappers import Sharded
from a2lib.experiments.harness.conditions import conditions
from a2lib.experiments.harness.ranks import RankJob
from a2lib.experiments.harness.worker import free_memory
from a2lib.measure import FSDP, bulk, synchronize, trace
from a2lib.measure.failures import note as one_line
from a2lib.measure.memory import take_workspaces
from a2lib.parallel import capture_step

Row = dict[str, object]
# Of the memory of a GPU, what weights, gradients and moments of all that are in turns may take.
SHARE = 0.7
COLUMNS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "gathered": "whole_bytes",
    "travelling": "travelling_bytes",
}
# Nanoseconds of a picture, and of it before the last backward's first kernel.
LENGTH, BEFORE = 24_000_000, 12_000_000


def measure(job: RankJob) -> None:
    """Time each way that is wanted, all in turns where their states fit together."""
    if job.expired():
        return
    keys = [key for keys in job.wanted.values() for key in keys]
    # Ours last: what is drawn of it takes a profiler, which leaves the processes slower.
    keys.sort(key=lambda key: key["wrapper"] == OURS)
    job.begin(next(iter(job.wanted)))
    with on_stream(job.device), contextlib.ExitStack() as held:
        plain = Training(job.spec, job.device, job.rank, job.seed)
        for _ in range(WARMUP):
            plain.step(send=False)
        without = lambda: plain.step(send=False)  # noqa: E731
        if job.spec["capture"]:
            without = held.enter_context(capture_step(without)).replay
        groups = [keys] if _fit(job, plain, len(keys)) else [[key] for key in keys]
        for group in groups:
            if job.expired():
                return
            free_memory(job.device)  # wrappers are cycles
            _in_turns(job, group, plain, without)


def _fit(job: RankJob, plain: Training, ways: int) -> bool:
    if job.device != "cuda":
        return True
    state = 16 * sum(p.numel() for p in plain.parameters)
    room = SHARE * torch.cuda.mem_get_info()[1]
    return state * (1 + ways / job.world_size) <= room


def _in_turns(job: RankJob, keys: list[Row], plain: Training, without: Callable) -> None:
    """Rows of ``keys``, and what is drawn of ours."""
    made: list[tuple[Row, Sharded]] = []
    steps: list[Callable] = []
    with contextlib.ExitStack() as held:
        for key in keys:
            job.begin(key["wrapper"])
            training = Sharded(job.spec, job.device, job.rank, job.seed, key["wrapper"])
            for _ in range(WARMUP):
                training.step(send=True)
            wrong = worst(job.everyone(training.deviation_from(plain)))
            if wrong.exceeds(TOLERANCE[job.spec["precision"]]):
                job.put({**key, "conditions": conditions(job.device), "status": "error",
                         "note": f"gradients are off their mean by {wrong}"})  # fmt: skip
                continue
            step = lambda training=training: training.step(send=True)  # noqa: E731
            if job.spec["capture"]:
                step = held.enter_context(capture_step(step)).replay
            made.append((key, training))
            steps.append(step)
        times = in_turns(job, FSDP, steps, without) if made else []
    # What comes takes as much memory again as the graph that is gone.
    free_memory(job.device)
    for (key, training), row in zip(made, times, strict=True):
        row |= {**key, "conditions": conditions(job.device), "status": "ok", "note": ""}
        if key["wrapper"] != OURS:
            job.put(row)
            continue
        table = []
        try:
            table, row["ms_waited"] = gathers.look(job, training)
        except Exception as error:  # the times are measured, whatever the marks come to
            row["note"] = one_line(f"no marks: {error}")
        job.put(row)
        if table:
            gathers.store(job, key, table)
        if not job.spec["capture"]:
            _draw(job, training, key)


def _draw(job: RankJob, training: Sharded, key: Mapping[str, object]) -> None:
    """Store the bulk table ``strip`` of a step; collective. What fails is told, and is no row."""
    try:
        found = traces.record(training, job.rank == 0)
        if found is not None:
            begin = min(k.start_ns for k in traces.last_backward(found))
            rows = traces.strip(found, begin - BEFORE, LENGTH)
            name = f"fsdp-{key['model']}-{job.world_size}-ranks"
            bulk.put("strip", job.store.device, name, rows, run=job.run,
                     about={"section": "fsdp", **key}, data=job.store.data)  # fmt: skip
    except trace.TraceError as error:
        job.failed(f"{key['wrapper']}: {error}")


def memory(job: RankJob) -> None:
    """Each way alone: what rank 0 holds at the moments of its first step and of a later one."""
    for culprit, keys in job.wanted.items():
        if job.expired():
            return
        job.begin(culprit)
        with on_stream(job.device):
            take_workspaces(job.device)
            free_memory(job.device)
            held = _moments(job, keys[0]["wrapper"])
        for key in keys:
            row = held[key["step_number"], key["moment"]]
            job.put({**key, **row, "status": "ok", "note": ""})


def _moments(job: RankJob, wrapper: str) -> dict[tuple[int, str], Row]:
    cuda = job.device == "cuda"
    entry = _stats()["requested_bytes.all.current"] if cuda else 0
    training = Sharded(job.spec, job.device, job.rank, job.seed, wrapper)

    def now() -> Row:
        row = {COLUMNS[part]: size for part, size in training.held_bytes().items()}
        if cuda:
            row["present_bytes"] = _stats()["requested_bytes.all.current"] - entry
        return row

    held = {(0, "init"): now()}
    fullest: Row = {}

    def sample(*_: object) -> None:
        """What is allocated is known to the host at once."""
        row = now()
        if _total(row) > _total(fullest):
            fullest.clear()
            fullest.update(row)

    optimizer = training.workload.optimizer
    for number in range(STEADY + 1):
        steady = number == STEADY
        if steady:
            synchronize(job.device)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            if wrapper == OURS:
                training.wrapper.observe(sample)

        def note(moment: str, number: int = number) -> None:
            held[number, moment] = now()

        at = {"backward": lambda note=note: note("forward"),
              "optimizer": lambda note=note: note("before")}  # fmt: skip
        after = optimizer.register_step_post_hook(lambda *_, note=note: note("after"))
        with training.told(at):
            training.step(send=True)
        after.remove()
        synchronize(job.device)
    # Of PyTorch's it is not known what there is beside its parameters.
    held[STEADY, "peak"] = {**fullest} if fullest or cuda else held[STEADY, "before"]
    if cuda:
        free, total = torch.cuda.mem_get_info()
        held[STEADY, "peak"] |= {
            "tensor_bytes": _stats()["requested_bytes.all.peak"] - entry,
            "allocated_bytes": _stats()["allocated_bytes.all.peak"],
            "reserved_bytes": _stats()["reserved_bytes.all.current"],
            "driver_bytes": total - free,
        }
    if wrapper == OURS:
        training.wrapper.observe(None)
    return {moment: held[moment] for moment in MOMENTS}


def _stats() -> dict[str, int]:
    """Of the allocator; "requested" is what tensors ask it for."""
    return torch.cuda.memory_stats()


def _total(row: Row) -> int:
    known = row.get("present_bytes")
    return sum(row.values()) if known is None else known

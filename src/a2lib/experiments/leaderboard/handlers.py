"""What each rank does for the leaderboard's section: one task is one way to take the step.

The time is that of ``triton.testing.do_bench``, whose counts of steps follow from a first estimate:
here they are the same on every rank, since steps are paired by the ranks' collectives.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from a2lib.experiments.compile import inductor
from a2lib.experiments.data_parallel import traces
from a2lib.experiments.harness.conditions import conditions
from a2lib.experiments.harness.ranks import RankJob
from a2lib.experiments.harness.rest import Mark, meet, slowest
from a2lib.experiments.harness.worker import free_memory
from a2lib.experiments.leaderboard.training import Training
from a2lib.experiments.steps import MODELS
from a2lib.measure import LEADERBOARD, memory, synchronize, trace
from a2lib.theory.memory.keeping import (
    CHUNK,
    PRODUCTS,
    BlockPlan,
    block_always,
    block_results,
    choose,
    working_bytes,
)
from a2lib.theory.transformer import forward_flops_by_part

Row = dict[str, object]
# Of do_bench: steps for the estimate.
ESTIMATED = 5
MARKED = 2  # steps with marks between their phases
# Operations a second that the plan assumes. The choice of products does not depend on it; how much
# a block may send does, by the time its forward takes.
FLOPS = {"cuda": 700e12, "cpu": 1e9}
# Of the measured rate of the link what a plan counts on, of the host's memory what all ranks take.
LINK_SHARE, HOST_SHARE = 0.7, 0.8
LINK_BYTES = 2**28
# Left free beside what the arithmetic knows: fragments, and what NCCL takes later.
SPARE_BYTES = 4e9
# Of a transfer of the CPU's trial, which is a copy.
CPU_LINK = 1e12


def measure(job: RankJob) -> None:
    """Measure the one way of this task."""
    ((culprit, (key,)),) = job.wanted.items()
    if job.expired():
        return
    job.begin(culprit)
    free_memory(job.device)
    with contextlib.ExitStack() as held:
        held.callback(inductor.forget)
        if job.spec["cold"]:  # caches that are empty, of this rank alone
            held.enter_context(inductor.caches_in(held.enter_context(inductor.empty_folder())))
        around = {"conditions": conditions(job.device), "status": "ok", "note": ""}
        job.put({**key, **_row(job, key), **around})


def _row(job: RankJob, key: Mapping[str, object]) -> Row:
    cuda, spec = job.device == "cuda", job.spec
    if cuda:
        # Blocks of several sizes come and go, and nearly all memory is used.
        memory.expandable_segments(True)
    meet(job.device)
    begin = time.perf_counter()
    training = Training(spec, job.device, job.rank, job.seed, _plans(job))
    training.step()
    synchronize(job.device)
    ready = 1e3 * (time.perf_counter() - begin)
    row: Row = {"ms_ready": max(job.everyone(ready)) if spec["cold"] else None}
    row |= _looked_at(job, training)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    by_rank = job.everyone(board(training.step, job, spec["warmup_ms"], spec["rep_ms"]))
    row |= slowest(by_rank).row(LEADERBOARD)
    row["ms_min"] = min(map(max, zip(*by_rank, strict=True)))
    if cuda:
        row["allocated_bytes"] = max(job.everyone(torch.cuda.max_memory_allocated()))
        row["reserved_bytes"] = max(job.everyone(torch.cuda.memory_reserved()))
    if training.plans is not None:
        left = sum(len(PRODUCTS) - len(plan.kept) for plan in training.plans)
        row["products_again"] = left
    row["host_bytes"] = training.mover.moved_bytes if training.mover else 0
    # Last: a profiler leaves a process slower.
    traces.store(
        job,
        training,
        key,
        (key["way"], f"{key['layers']}-layers"),
        lambda found: trace.kernel_rows(found.kernels),
        training.step,
        table="kernels",
        steps=1,
    )
    return row


def board(step: Callable[[], object], job: RankJob, warmup_ms: int, rep_ms: int) -> list[float]:
    """This rank's milliseconds of each step, as ``do_bench`` takes them; collective. On the CPU a
    fraction of them by the host's clock."""
    cuda = job.device == "cuda"
    clear: Callable[[], object] = lambda: None  # noqa: E731
    if cuda:
        from triton.runtime import driver

        cache = driver.active.get_empty_cache_for_benchmark()
        clear = lambda: driver.active.clear_cache(cache)  # noqa: E731
    else:
        warmup_ms, rep_ms = warmup_ms // 100, rep_ms // 100
    step()
    synchronize(job.device)
    first = Mark(job.device)
    for _ in range(ESTIMATED):
        clear()
        step()
    last = Mark(job.device)
    synchronize(job.device)
    estimate = max(job.everyone(first.ms_until(last) / ESTIMATED))
    for _ in range(max(1, int(warmup_ms / estimate))):
        step()
    marks = []
    for _ in range(max(1, int(rep_ms / estimate))):
        clear()
        begin = Mark(job.device)
        step()
        marks.append((begin, Mark(job.device)))
    synchronize(job.device)
    return [begin.ms_until(end) for begin, end in marks]


def _looked_at(job: RankJob, training: Training) -> Row:
    """Loss, norm of the gradients, and of a few steps the phases and what forward leaves."""
    found: Row = {}

    def norm(moment: str) -> None:
        if moment == "backward":
            found["gradient_norm"] = training.gradient_norm()

    losses = job.everyone(training.step(norm).item())
    found["loss"] = statistics.fmean(losses)
    times: dict[str, list[float]] = {}
    kept: list[int] = []
    for _ in range(MARKED):
        meet(job.device)
        entry = torch.cuda.memory_allocated() if job.device == "cuda" else 0
        marks = [("", Mark(job.device))]

        def mark(moment: str, marks: list = marks, entry: int = entry) -> None:
            marks.append((moment, Mark(job.device)))
            if moment == "forward" and job.device == "cuda":
                kept.append(torch.cuda.memory_allocated() - entry)

        training.step(mark)
        synchronize(job.device)
        for (_, before), (name, after) in itertools.pairwise(marks):
            times.setdefault(name, []).append(before.ms_until(after))
    for name, own in times.items():
        found[f"ms_{name}"] = max(job.everyone(statistics.median(own)))
    if kept:
        found["kept_bytes"] = max(job.everyone(max(kept)))
    return found


def _plans(job: RankJob) -> Callable[[Training], list[BlockPlan]] | None:
    """How the plan of a way is made, once the model is there: the same on every rank."""
    keeps, layers = job.spec["keeps"], job.spec["layers"]
    if keeps == "input":
        return None
    if keeps == "attention":
        return lambda training: [BlockPlan(kept=())] * layers
    return lambda training: plan(job, training, moves=keeps == "moved")


def plan(job: RankJob, training: Training, moves: bool) -> list[BlockPlan]:
    """As much as fits this rank and the others; collective."""
    spec, shape = job.spec, MODELS[job.spec["model"]]
    layers, tokens = spec["layers"], spec["batch"] * spec["context"]
    element = 2 if spec["dtype"] == "bf16" else 4
    always = block_always(shape, tokens, element)
    results = block_results(shape, tokens, FLOPS[job.device], element)
    if spec["room_percent"] is not None:
        whole = layers * (sum(always) + sum(one.bytes for one in results))
        room = whole * spec["room_percent"] / 100
    else:
        free_memory(job.device)
        # AdamW's moments come with the first step.
        beside = working_bytes(shape, tokens, CHUNK, element) + 2 * training.local_bytes()
        room = memory.free_bytes(job.device) - beside - SPARE_BYTES
    link: Mapping[str, float] = {}
    if moves:
        parts = forward_flops_by_part(shape, spec["batch"], spec["context"], causal=True)
        flops = sum(parts[name] for name in ("projections", "attention", "ffn"))
        host = HOST_SHARE * memory.available_bytes() / job.world_size
        link = {
            "host_room": min(job.everyone(host)),
            "link": min(job.everyone(link_rate(job.device))),
            "block_ms": 1e3 * flops / shape.num_layers / FLOPS[job.device],
        }
    return choose(always, results, layers, min(job.everyone(room)), **link)


def link_rate(device: str) -> float:
    """Bytes a second that a plan may count on from the device to the host."""
    if device != "cuda":
        return CPU_LINK
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    for _ in range(2):
        first = Mark(device)
        here.copy_(there, non_blocking=True)
        last = Mark(device)
        synchronize(device)
    return LINK_SHARE * LINK_BYTES / (first.ms_until(last) / 1e3)

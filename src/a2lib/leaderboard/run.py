"""What each rank does: makes the step ready, looks at it, and times it by the board's protocol.

That is ``triton.testing.do_bench``, whose counts of steps follow from a first estimate: here they
are the same on every rank, since steps are paired by the ranks' collectives.
"""

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from a2lib.lab import Timing, device_slug, memory, synchronize
from a2lib.lab.clock import Clock, Mark
from a2lib.lab.timing import meet, slowest
from a2lib.leaderboard import Step
from a2lib.leaderboard.training import Training
from a2lib.parallel.group import everyone
from a2lib.parallel.rank import progress
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
# Left free on a GPU beside what the arithmetic knows: fragments, and what NCCL takes later.
SPARE_BYTES = {"cuda": 4e9, "cpu": 0}
# Of a transfer of the CPU's trial, which is a copy.
CPU_LINK = 1e12


def take(spec: Mapping[str, object], device: str, seed: int) -> Row:
    """What ``python -m a2lib.leaderboard`` has every rank do: ``measure`` on a machine, of which
    rank 0 says how far it is; the row with the device's name and the bytes that it has."""
    step = Step.from_spec(spec)

    def say(moment: str) -> None:
        if dist.get_rank() == 0:
            progress(moment=moment)

    if why := too_large(step, device, dist.get_world_size()):
        say(f"{why}; it is tried")
    timing, row, _ = measure(step, device, seed, say)
    row["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {**dataclasses.asdict(timing), **row, "slug": device_slug()}


def too_large(step: Step, device: str, ranks: int) -> str:
    """Why a step will not fit, in words; "" where it may. A CPU's memory is that of all ranks."""
    needed = step.rank_bytes(ranks) * (ranks if device == "cpu" else 1)
    return memory.too_little(device, needed, "some")


def measure(
    step: Step, device: str, seed: int, say: Callable[[str], object] = lambda moment: None
) -> tuple[Timing, Row, Training]:
    """The time of each step, the slowest rank's; the other columns of the section ``leaderboard``;
    and the training, for more of it. Collective.

    ``ms_ready`` runs from nothing to the end of the first step: it is that of empty caches of the
    compilers where these are empty. ``say`` is told what comes next.
    """
    cuda = device == "cuda"
    if cuda:
        # Blocks of several sizes come and go, and nearly all memory is used.
        memory.expandable_segments(True)
    meet(device)
    say("the model, and the first step")
    begin = time.perf_counter()
    training = Training(step, device, dist.get_rank(), seed, plans_of(step, device))
    training.step()
    synchronize(device)
    row: Row = {"ms_ready": max(everyone(1e3 * (time.perf_counter() - begin)))}
    say("phases")
    row |= _looked_at(training, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    say("warm-up and timed steps")
    by_rank = everyone(board(training.step, device, step.warmup_ms, step.rep_ms))
    if cuda:
        row["allocated_bytes"] = max(everyone(torch.cuda.max_memory_allocated()))
        row["reserved_bytes"] = max(everyone(torch.cuda.memory_reserved()))
    if training.plans is not None:
        left = sum(len(PRODUCTS) - len(plan.kept) for plan in training.plans)
        row["products_again"] = left
    row["host_bytes"] = training.mover.moved_bytes if training.mover else 0
    return slowest(by_rank), row, training


def board(step: Callable[[], object], device: str, warmup_ms: int, rep_ms: int) -> list[float]:
    """This rank's milliseconds of each step, as ``do_bench`` takes them; collective. On the CPU a
    fraction of them by the host's clock."""
    clock = Clock(device)
    if device == "cpu":
        warmup_ms, rep_ms = warmup_ms // 100, rep_ms // 100
    clock.samples(step, 1)
    estimate = max(everyone(statistics.fmean(clock.samples(step, ESTIMATED))))
    for _ in range(max(1, int(warmup_ms / estimate))):
        step()
    return clock.samples(step, max(1, int(rep_ms / estimate)))


def _looked_at(training: Training, device: str) -> Row:
    """Loss, norm of the gradients, and of a few steps the phases and what forward leaves."""
    found: Row = {}

    def norm(moment: str) -> None:
        if moment == "backward":
            found["gradient_norm"] = training.gradient_norm()

    losses = everyone(training.step(norm).item())
    found["loss"] = statistics.fmean(losses)
    times: dict[str, list[float]] = {}
    kept: list[int] = []
    for _ in range(MARKED):
        meet(device)
        entry = memory.allocated_bytes(device)
        marks = [("", Mark(device))]

        def mark(moment: str, marks: list = marks, entry: int = entry) -> None:
            marks.append((moment, Mark(device)))
            if moment == "forward" and device == "cuda":
                kept.append(memory.allocated_bytes(device) - entry)

        training.step(mark)
        synchronize(device)
        for (_, before), (name, after) in itertools.pairwise(marks):
            times.setdefault(name, []).append(before.ms_until(after))
    for name, own in times.items():
        found[f"ms_{name}"] = max(everyone(statistics.median(own)))
    if kept:
        found["kept_bytes"] = max(everyone(max(kept)))
    return found


def plans_of(step: Step, device: str) -> Callable[[Training], list[BlockPlan]] | None:
    """How the plan of a way is made, once the model is there: the same on every rank."""
    if step.way.keeps == "input":
        return None
    if step.way.keeps == "attention":
        return lambda training: [BlockPlan(kept=())] * step.shape.num_layers
    return lambda training: plan(step, training.local_bytes(), device)


def plan(step: Step, local_bytes: int, device: str) -> list[BlockPlan]:
    """As much as fits this rank, which has ``local_bytes`` of parameters, and the others;
    collective. Raises ValueError, in one line, where nothing fits."""
    shape, tokens, element = step.shape, step.tokens, step.element_bytes
    always = block_always(shape, tokens, element)
    results = block_results(shape, tokens, FLOPS[device], element)
    if step.room_percent is not None:
        whole = shape.num_layers * (sum(always) + sum(one.bytes for one in results))
        room = whole * step.room_percent / 100
    else:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        # AdamW's moments come with the first step.
        beside = working_bytes(shape, tokens, CHUNK, element) + 2 * local_bytes
        room = memory.free_bytes(device) - beside - SPARE_BYTES[device]
    link: Mapping[str, float] = {}
    if step.way.keeps == "moved":
        parts = forward_flops_by_part(shape, step.batch, step.context, causal=True)
        flops = sum(parts[name] for name in ("projections", "attention", "ffn"))
        hosts = everyone(HOST_SHARE * memory.available_bytes())
        link = {
            "host_room": min(hosts) / len(hosts),
            "link": min(everyone(link_rate(device))),
            "block_ms": 1e3 * flops / shape.num_layers / FLOPS[device],
        }
    return choose(always, results, shape.num_layers, min(everyone(room)), **link)


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

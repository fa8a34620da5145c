"""The course's leaderboard of 2026: a training step of an 8B model on two GPUs, 32,768 tokens each.

    torchrun --standalone --nproc-per-node 2 -m a2lib.leaderboard
    torchrun --standalone --nproc-per-node 2 -m a2lib.leaderboard --way recomputed
    torchrun --standalone --nproc-per-node 1 -m a2lib.leaderboard --num-layers 8
    torchrun --standalone --nproc-per-node 2 -m a2lib.leaderboard --size tiny

The first takes the fastest way with masters in fp32 and no FP8, the second PyTorch's parts, the
third a part of the model on one GPU, the last runs without a GPU.
``LADDER`` has the ways to take the step, of which each changes one thing of the one before.
``Training`` is the step, ``plan`` decides what each block keeps, ``measure`` times the step as
triton.testing.do_bench does: 30 s of steps after a warm-up of 10 s, the L2 cache cleared before
each, of the slower rank; on the CPU a hundredth of that, by the host's clock. The counts of steps
are the same on every rank, since steps are paired by the ranks' collectives. The learning rate is
0. The compilers' caches are empty at first, and ready is the end of the first step from there.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from a2lib.activations import CHUNK, PRODUCTS, BlockPlan
from a2lib.checks import check_sizes
from a2lib.lab import Timing, inductor, memory, synchronize
from a2lib.lab.device import device_kind
from a2lib.lab.timing import Clock, Mark, RankTimes, meet
from a2lib.lab.training import fully_sharded
from a2lib.lab.worker import join_group
from a2lib.model import TransformerLM, cross_entropy
from a2lib.model.fp8 import use_fp8
from a2lib.model.layers import IGNORED
from a2lib.model.offload import LEAST, Mover, PlannedBlocks
from a2lib.parallel import FSDP
from a2lib.parallel.group import everyone, local
from a2lib.shapes import MODELS, Shape
from a2lib.theory.memory.keeping import (
    block_always,
    block_results,
    choose,
    fp8_bytes,
    working_bytes,
)
from a2lib.theory.transformer import forward_flops_by_part, parameter_count, step_flops


@dataclass(frozen=True)
class Way:
    """A way to take a step.

    ``fsdp`` shards the model: "torch" is PyTorch's FSDP2, "a2lib" this library's. ``head`` makes
    the loss: in "chunks" of tokens, each computed again in backward, or "fused", its gradients made
    with it. ``keeps`` is what stays of a block for its backward: its "input"; "attention"'s results
    too; as many results of products as are "fitting" the device; and of those that are not,
    "moved", as many as the link to the host hides. ``attention`` "" is that of the step.
    ``communication`` is how this library's FSDP sends: by the "backend", NCCL, or by
    "copy_engines". ``ffn`` is what the FFN's products take: "bf16", which is the step's dtype, or
    "fp8". ``states`` is the dtype of weights and moments, of which "bf16" rounds every
    update; this library's FSDP has masters in fp32 alone.
    """

    fsdp: str
    head: str
    keeps: str
    attention: str = ""
    communication: str = "backend"
    ffn: str = "bf16"
    states: str = "fp32"

    @property
    def states_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.states == "bf16" else torch.float32


LADDER = {
    "recomputed": Way("torch", "chunks", "input"),
    "attention_kept": Way("torch", "chunks", "attention"),
    "fused_head": Way("torch", "fused", "attention"),
    "own_fsdp": Way("a2lib", "fused", "attention"),
    "products_kept": Way("a2lib", "fused", "fitting"),
    "offloaded": Way("a2lib", "fused", "moved"),
    "own_attention": Way("a2lib", "fused", "moved", "flash"),
    "own_copies": Way("a2lib", "fused", "moved", "flash", "copy_engines"),
    "fp8_ffn": Way("a2lib", "fused", "moved", "flash", "copy_engines", ffn="fp8"),
    "bf16_states": Way("torch", "fused", "fitting", "flash", states="bf16"),
}
SIZE, BATCH = "8B", 1
CONTEXT = {"cuda": 32_768, "cpu": 32}
ATTENTION = {"cuda": "sdpa_cudnn", "cpu": "sdpa_flash"}
DTYPE = {"cuda": "bf16", "cpu": "fp32"}
COMPILER = {"cuda": "inductor", "cpu": "aot_eager"}
WARMUP_MS, REP_MS = 10_000, 30_000
# Of do_bench: steps for its estimate. And steps that are looked at by phase.
ESTIMATED, MARKED = 5, 2
# Operations a second that the plan assumes. The choice of products does not depend on it; how much
# a block may send does, by the time its forward takes.
FLOPS = {"cuda": 700e12, "cpu": 1e9}
# Tensor cores multiply FP8 at twice the rate of bf16.
FP8_SPEEDUP = 2
# Of the measured rate of the link what a plan counts on, of the host's memory what all ranks take.
LINK_SHARE, HOST_SHARE = 0.7, 0.8
LINK_BYTES = 2**28
# Left free on a GPU beside what the arithmetic knows: fragments, and what NCCL takes later.
SPARE_BYTES = {"cuda": 4e9, "cpu": 0}
# Bytes a second of a transfer of the CPU's trial, which is a copy.
CPU_LINK = 1e12

Phase = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Step:
    """A step of ``way`` on ``batch`` sequences of ``context`` tokens on each rank.

    ``dtype`` is what it computes in, "bf16" or "fp32". ``room_percent`` is how much may stay of
    what blocks could keep; None: what there is room for.
    """

    way: Way
    shape: Shape
    batch: int
    context: int
    attention: str
    dtype: str
    room_percent: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return self.batch * self.context

    @property
    def element_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    @property
    def flops(self) -> int:
        """Operations that a rank's step needs: the model's, by forward and backward, causal
        attention half, and nothing that is computed again."""
        return step_flops(self.shape, self.batch, self.context, causal=True)

    def working_bytes(self) -> int:
        """Return the most bytes at the peak beside states and what blocks keep."""
        work = working_bytes(self.shape, self.tokens, CHUNK, self.element_bytes)
        return work + (fp8_bytes(self.shape, self.tokens) if self.way.ffn == "fp8" else 0)


class ChunkedHead(TransformerLM):
    """With the loss as PyTorch's parts have it in little memory: the head and the loss of so many
    tokens at a time, each chunk computed again in backward."""

    chunk = CHUNK
    cross_entropy: Callable = staticmethod(cross_entropy)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        def chunk_loss(rows: Tensor, rows_targets: Tensor) -> Tensor:
            return self.cross_entropy(self.lm_head(rows), rows_targets, reduction="sum")

        rows = x.flatten(0, -2).split(self.chunk)
        total = 0.0
        for pair in zip(rows, targets.flatten().split(self.chunk), strict=True):
            total += checkpoint(chunk_loss, *pair, use_reentrant=False, preserve_rng_state=False)
        return total / (targets != IGNORED).sum()


class Training:
    """The model of ``spec``, sharded, with this rank's batch and fused AdamW; collective.

    ``plans(training)`` says what each block keeps, and may look at what is free by then; None keeps
    each block's input, and computes the block again. With ``lr`` 0 the weights stay what they are,
    at the work of any other step. ``wide`` is the dtype of the masters and of the optimizer, None
    the way's; ``compiler`` the backend of torch.compile; tensors below ``least_moved`` bytes are
    not sent to the host.

    Under ``dtype`` bf16 the products make gradients in bf16, which travel and are added up in
    float32, ours as PyTorch's: a link has a block's whole backward for twice the bytes, and the
    mean is rounded no further.
    """

    def __init__(
        self,
        spec: Step,
        device: str,
        rank: int,
        seed: int,
        plans: Callable[[Self], list[BlockPlan]] | None,
        *,
        lr: float = 0.0,
        wide: torch.dtype | None = None,
        compiler: str = "",
        least_moved: int | None = None,
    ) -> None:
        shape, way = spec.shape, spec.way
        self.device = device
        kind = TransformerLM if way.head == "fused" else ChunkedHead
        self.model = kind.from_size(
            shape,
            spec.context,
            attention=way.attention or spec.attention,
            device=device,
            dtype=wide or way.states_dtype,
            seed=seed,
        )
        if way.ffn == "fp8":
            use_fp8(self.model)
        compiled = {"backend": compiler or COMPILER[device], "fullgraph": True, "dynamic": False}
        for module in (*self.model.layers, self.model.ln_final):
            module.compile(**compiled)
        if way.head == "chunks":
            self.model.cross_entropy = torch.compile(cross_entropy, **compiled)
        low = torch.bfloat16 if spec.dtype == "bf16" else None
        if way.fsdp == "a2lib":
            alone = dist.get_world_size() == 1  # and sends nothing
            communication = "backend" if alone else way.communication
            self.wrapper: nn.Module = FSDP(self.model, low, communication=communication)
        else:
            fully_sharded(self.model, low, device)
            self.wrapper = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gc.collect()
        self.plans, self.mover = None, None
        if plans is None:
            self.model.use_checkpointing("block")
        else:
            self.plans = plans(self)
            most = max(plan.moved for plan in self.plans)
            if most:
                least = (LEAST if device == "cuda" else 1) if least_moved is None else least_moved
                self.mover = Mover(device, least=least, in_flight=most)
            self.model.use_checkpointing(PlannedBlocks(self.plans, self.mover))
        generator = torch.Generator(device).manual_seed(seed + 1 + rank)
        size = (2, spec.batch, spec.context)
        self.token_ids, self.targets = torch.randint(
            shape.vocab_size, size, generator=generator, device=device
        )

    def step(self, phase: Phase = nullcontext) -> Tensor:
        """Take one step and return this rank's loss; each part is in the context of its name,
        ``phase("forward")``, "backward" and "optimizer"."""
        with phase("forward"):
            loss = self.wrapper(self.token_ids, self.targets)
        with phase("backward"):
            loss.backward()
            if isinstance(self.wrapper, FSDP):
                self.wrapper.finish_gradient_synchronization()
        with phase("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def gradient_norm(self) -> float:
        """Return the norm of all gradients over all ranks, between backward and the optimizer;
        collective."""
        if isinstance(self.wrapper, FSDP):
            norm = self.wrapper.clip_grad_norm_(math.inf)
        else:
            norm = nn.utils.clip_grad_norm_(self.parameters, math.inf).full_tensor()
        return norm.item()

    def local_bytes(self) -> int:
        """Return the bytes of this rank's parameters."""
        return sum(local(p).nbytes for p in self.parameters)

    def products_again(self) -> int | None:
        """Return how many products of all blocks are computed again; None where blocks are."""
        if self.plans is None:
            return None
        return sum(len(PRODUCTS) - len(plan.kept) for plan in self.plans)

    def whole(self) -> dict[str, Tensor]:
        """Return every parameter whole, by name; collective."""
        if isinstance(self.wrapper, FSDP):
            return self.wrapper.gather_full_params()
        return {name: p.full_tensor() for name, p in self.model.named_parameters()}


def plans_of(step: Step, device: str) -> Callable[[Training], list[BlockPlan]] | None:
    """Return what makes the plan of a way once the model is there, the same on every rank."""
    if step.way.keeps == "input":
        return None
    if step.way.keeps == "attention":
        return lambda training: [BlockPlan(kept=())] * step.shape.num_layers
    return lambda training: plan(step, training.local_bytes(), device)


def plan(step: Step, local_bytes: int, device: str) -> list[BlockPlan]:
    """Return a plan that keeps as much as fits this rank, which has ``local_bytes`` of parameters,
    and the others; collective. Raises ValueError, in one line, where nothing fits."""
    shape, tokens, element = step.shape, step.tokens, step.element_bytes
    always = block_always(shape, tokens, element)
    results = block_results(shape, tokens, FLOPS[device], element)
    if step.room_percent is not None:
        all_of_them = shape.num_layers * (sum(always) + sum(result.bytes for result in results))
        room = all_of_them * step.room_percent / 100
    else:
        memory.free_memory(device)
        # AdamW's moments come with the first step.
        beside = step.working_bytes() + 2 * local_bytes
        room = memory.free_bytes(device) - beside - SPARE_BYTES[device]
    room = min(everyone(room))
    if step.way.keeps == "fitting":
        return choose(always, results, shape.num_layers, room)
    parts = forward_flops_by_part(shape, step.batch, step.context, causal=True)
    ffn = parts["ffn"] / (FP8_SPEEDUP if step.way.ffn == "fp8" else 1)
    block_flops = (parts["projections"] + parts["attention"] + ffn) / shape.num_layers
    hosts = everyone(HOST_SHARE * memory.available_bytes())
    return choose(
        always,
        results,
        shape.num_layers,
        room,
        host_room=min(hosts) / len(hosts),
        link=min(everyone(link_rate(device))),
        block_ms=1e3 * block_flops / FLOPS[device],
    )


def link_rate(device: str) -> float:
    """Return the bytes a second that a plan may count on from the device to the host."""
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


def measure(
    step: Step,
    device: str,
    seed: int,
    *,
    warmup_ms: int = WARMUP_MS,
    rep_ms: int = REP_MS,
    say: Callable[[str], object] = lambda moment: None,
) -> tuple[Timing, dict[str, object], Training]:
    """Return the time of a step, the slowest rank's; the other columns of the table
    ``leaderboard``; and the training, for more of it. Collective.

    ``ms_ready`` runs from nothing to the end of the first step: it is that of empty caches of the
    compilers within ``empty_caches``. ``say`` is told what comes next.
    """
    if device == "cuda":
        # Blocks of several sizes come and go, and nearly all memory is used.
        memory.expandable_segments(True)
    meet(device)
    say("the model, and the first step")
    begin = time.perf_counter()
    training = Training(step, device, dist.get_rank(), seed, plans_of(step, device))
    training.step()
    synchronize(device)
    row: dict[str, object] = {"ms_ready": max(everyone(1e3 * (time.perf_counter() - begin)))}
    say("phases")
    row |= loss_and_norm(training)
    row |= phases(training)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    say("warm-up and timed steps")
    by_rank = everyone(board(training.step, device, warmup_ms, rep_ms))
    if device == "cuda":
        row["allocated_bytes"] = max(everyone(torch.cuda.max_memory_allocated()))
        row["reserved_bytes"] = max(everyone(torch.cuda.memory_reserved()))
    row["products_again"] = training.products_again()
    row["host_bytes"] = training.mover.moved_bytes if training.mover else 0
    return RankTimes(by_rank).slowest, row, training


def board(step: Callable[[], object], device: str, warmup_ms: int, rep_ms: int) -> list[float]:
    """Return this rank's milliseconds of each step, as ``do_bench`` takes them; collective. On the
    CPU a hundredth of them by the host's clock."""
    clock = Clock(device)
    if device == "cpu":
        warmup_ms, rep_ms = warmup_ms // 100, rep_ms // 100
    clock.samples(step, 1)
    estimate = max(everyone(statistics.fmean(clock.samples(step, ESTIMATED))))
    for _ in range(max(1, int(warmup_ms / estimate))):
        step()
    return clock.samples(step, max(1, int(rep_ms / estimate)))


def loss_and_norm(training: Training) -> dict[str, float]:
    """Return the mean loss of the ranks and the norm of all gradients, of one step; collective."""
    norms = []

    def phase(name: str) -> AbstractContextManager:
        if name == "optimizer":
            norms.append(training.gradient_norm())
        return nullcontext()

    losses = everyone(training.step(phase).item())
    return {"loss": statistics.fmean(losses), "gradient_norm": norms[0]}


def phases(training: Training) -> dict[str, float]:
    """Return the milliseconds of each phase, the slowest rank's median of a few steps, and on a GPU
    the bytes that forward and loss leave for the backward; collective."""
    device = training.device
    marks: dict[str, list[tuple[Mark, Mark]]] = {}
    kept: list[int] = []

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        begin = Mark(device)
        yield
        marks.setdefault(name, []).append((begin, Mark(device)))
        if name == "forward":
            kept.append(memory.allocated_bytes(device) - entry)

    for _ in range(MARKED):
        meet(device)
        entry = memory.allocated_bytes(device)
        training.step(phase)
        synchronize(device)
    row = {}
    for name, pairs in marks.items():
        median = statistics.median(begin.ms_until(end) for begin, end in pairs)
        row[f"ms_{name}"] = max(everyone(median))
    if device == "cuda":
        row["kept_bytes"] = max(everyone(max(kept)))
    return row


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Within it this rank's compilers begin with nothing on disk or in the process."""
    with inductor.empty_folder() as folder, inductor.caches_in(folder):
        yield


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="a2lib.leaderboard",
        usage="torchrun --standalone --nproc-per-node 2 -m a2lib.leaderboard [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    ways = f"{', '.join(LADDER)} (the last that runs here with fp32 masters and no FP8)"
    add("--way", choices=LADDER, help=ways, metavar="NAME")
    add("--size", choices=MODELS, default=SIZE, help=", ".join(MODELS), metavar="NAME")
    add("--num-layers", type=int, help="blocks, in place of the size's own")
    tokens = f"tokens of a sequence ({CONTEXT['cuda']} on GPUs, {CONTEXT['cpu']} without)"
    add("--context", type=int, help=tokens)
    add("--batch", type=int, default=BATCH, help="sequences of a rank (%(default)s)")
    add("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    return command


def parse(arguments: Sequence[str], device: str) -> tuple[str, Step, int]:
    """Return the name of the way, the step and the seed; SystemExit for what cannot be on
    ``device``."""
    command = parser()
    options = command.parse_args(arguments)
    exact = []
    for name, way in LADDER.items():
        runs_here = device == "cuda" or way.attention != "flash"
        if options.way == name and not runs_here:
            command.error(f"way {name!r} needs a GPU")
        if runs_here and way.states == "fp32" and way.ffn == "bf16":
            exact.append(name)
    name = options.way or exact[-1]
    shape = MODELS[options.size]
    context = CONTEXT[device] if options.context is None else options.context
    try:
        if options.num_layers is not None:
            shape = dataclasses.replace(shape, num_layers=options.num_layers)
        check_sizes(context=context, batch=options.batch)
    except ValueError as error:
        command.error(str(error))
    step = Step(LADDER[name], shape, options.batch, context, ATTENTION[device], DTYPE[device])
    least = 16 * parameter_count(shape)  # masters, gradients and two moments, of all ranks
    if device == "cpu" and least > memory.available_bytes():  # which would swap, or be killed
        command.error(f"a step takes {least / 1e9:.0f} GB at least; allowed is what fits")
    return name, step, options.seed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in the ranks that torchrun has started; rank 0 prints."""
    begun = time.monotonic()
    device = device_kind()
    arguments = sys.argv[1:] if arguments is None else arguments
    first = os.environ.get("RANK", "0") == "0"
    with nullcontext() if first else contextlib.redirect_stderr(None):
        name, step, seed = parse(arguments, device)
        if "LOCAL_RANK" not in os.environ:
            parser().error("start it by torchrun, as --help shows")
        local_rank = int(os.environ["LOCAL_RANK"])
        if device == "cuda" and local_rank >= torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            parser().error(f"--nproc-per-node: allowed are 1 to {gpus}, the GPUs here")
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    join_group(device)

    def say(moment: str) -> None:
        if first:
            seconds = time.monotonic() - begun
            print(f"{name}: {seconds:.0f} s: {moment}", file=sys.stderr, flush=True)

    with empty_caches():
        timing, row, _ = measure(step, device, seed, say=say)
    if first:
        row = {"way": name, "ranks": dist.get_world_size(), **dataclasses.asdict(timing), **row}
        row |= {"tflops": step.flops / timing.ms / 1e9, "parameters": parameter_count(step.shape)}
        print(json.dumps(row, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The course's leaderboard of 2026: a training step of an 8B model on two GPUs, 32,768 tokens each.

``LADDER`` has the ways to take the step, of which each changes one thing of the one before.
``Training`` is the step, ``plan`` decides what each block keeps. notebooks/leaderboard.ipynb times
it; the fastest way with masters in fp32 and no FP8, on two GPUs, and a trial without any are

    papermill notebooks/leaderboard.ipynb -p ways own_copies
    papermill notebooks/leaderboard.ipynb -p model tiny
"""

import gc
import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from a2lib.activations import CHUNK, PRODUCTS, BlockPlan
from a2lib.lab import memory, synchronize
from a2lib.lab.timing import Mark
from a2lib.lab.training import fully_sharded
from a2lib.model import TransformerLM, cross_entropy
from a2lib.model.fp8 import use_fp8
from a2lib.model.layers import IGNORED
from a2lib.model.offload import LEAST, Mover, PlannedBlocks
from a2lib.parallel import FSDP
from a2lib.parallel.group import everyone, local
from a2lib.shapes import Shape
from a2lib.theory.memory.keeping import (
    block_always,
    block_results,
    choose,
    fp8_bytes,
    working_bytes,
)
from a2lib.theory.transformer import forward_flops_by_part


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
SIZE = "8B"
CONTEXT = {"cuda": 32_768, "cpu": 32}
ATTENTION = {"cuda": "sdpa_cudnn", "cpu": "sdpa_flash"}
DTYPE = {"cuda": "bf16", "cpu": "fp32"}
COMPILER = {"cuda": "inductor", "cpu": "aot_eager"}
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


def loss_and_norm(training: Training) -> dict[str, float]:
    """Return the mean loss of the ranks and the norm of all gradients, of one step; collective."""
    norms = []

    def phase(name: str) -> AbstractContextManager:
        if name == "optimizer":
            norms.append(training.gradient_norm())
        return nullcontext()

    losses = everyone(training.step(phase).item())
    return {"loss": statistics.fmean(losses), "gradient_norm": norms[0]}

"""One training step of several ranks: forward, loss, backward and AdamW, in any of the ways of the
ladder."""

import contextlib
import gc
import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from a2lib.leaderboard import FUSED, OURS, Step
from a2lib.model import TransformerLM, cross_entropy
from a2lib.model.offload import LEAST, Mover, PlannedBlocks
from a2lib.parallel import FSDP
from a2lib.parallel.fsdp.peer import fully_sharded
from a2lib.parallel.fsdp.shards import local
from a2lib.theory.memory.keeping import CHUNK, BlockPlan

DTYPES = {"bf16": torch.bfloat16, "fp32": None}
COMPILER = {"cuda": "inductor", "cpu": "aot_eager"}


class ChunkedHead(TransformerLM):
    """With the loss as PyTorch's parts have it in little memory: the head and the loss of so many
    tokens at a time, each chunk computed again in backward."""

    chunk = CHUNK
    cross_entropy: Callable = staticmethod(cross_entropy)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        def part(rows: Tensor, of: Tensor) -> Tensor:
            return self.cross_entropy(self.lm_head(rows), of) * len(of)

        pairs = zip(
            x.flatten(0, -2).split(self.chunk), targets.flatten().split(self.chunk), strict=True
        )
        parts = (
            checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs
        )
        return sum(parts) / targets.numel()


class Training:
    """The model of ``given``, sharded, with this rank's batch and fused AdamW; collective.

    ``plans(training)`` says what each block keeps, and may look at what is free by then; None keeps
    each block's input, and computes the block again. With ``lr`` 0 the weights stay what they are,
    at the work of any other step. ``wide`` is the dtype of the masters and of the optimizer.

    Under ``dtype`` bf16 the products make gradients in bf16, which travel and are added up in
    float32, ours as PyTorch's: a link has a block's whole backward for twice the bytes, and the
    mean is rounded no further.
    """

    def __init__(
        self,
        given: Step,
        device: str,
        rank: int,
        seed: int,
        plans: Callable[[Self], list[BlockPlan]] | None,
        lr: float = 0.0,
        wide: torch.dtype = torch.float32,
    ) -> None:
        shape, fused = given.shape, given.way.head == FUSED
        self.device = device
        kind = TransformerLM if fused else ChunkedHead
        place = {"device": device, "dtype": wide, "seed": seed}
        self.model = kind.from_size(shape, given.context, attention=given.attention, **place)
        how = {"backend": COMPILER[device], "fullgraph": True, "dynamic": False}
        for module in (*self.model.layers, self.model.ln_final):
            module.compile(**how)
        if not fused:
            self.model.cross_entropy = torch.compile(cross_entropy, **how)
        low = DTYPES[given.dtype]
        if given.way.wrapper == OURS:
            self.wrapper: nn.Module = FSDP(self.model, low)
        else:
            fully_sharded(self.model, low, device)
            self.wrapper = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gc.collect()
        # The context of each phase, for a profiler.
        self.ranges: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.plans, self.mover = None, None
        if plans is None:
            self.model.use_checkpointing("block")
        else:
            self.plans = plans(self)
            most = max(plan.moved for plan in self.plans)
            if most:
                least = LEAST if device == "cuda" else 1
                self.mover = Mover(device, least=least, in_flight=most)
            self.model.use_checkpointing(PlannedBlocks(self.plans, self.mover))
        generator = torch.Generator(device).manual_seed(seed + 1 + rank)
        size = (2, given.batch, given.context)
        self.token_ids, self.targets = torch.randint(
            shape.vocab_size, size, generator=generator, device=device
        )

    def step(self, at: Callable[[str], object] = lambda moment: None) -> Tensor:
        """One step, this rank's loss; ``at`` is told when a phase has ended."""
        with self.ranges("forward"):
            loss = self.wrapper(self.token_ids, self.targets)
        at("forward")
        with self.ranges("backward"):
            loss.backward()
            if isinstance(self.wrapper, FSDP):
                self.wrapper.finish_gradient_synchronization()
        at("backward")
        with self.ranges("optimizer"):
            self.optimizer.step()
        at("optimizer")
        self.optimizer.zero_grad()
        return loss.detach()

    def gradient_norm(self) -> float:
        """Of all gradients, over all ranks, between backward and the optimizer; collective."""
        if isinstance(self.wrapper, FSDP):
            norm = self.wrapper.clip_grad_norm_(math.inf)
        else:
            norm = nn.utils.clip_grad_norm_(self.parameters, math.inf).full_tensor()
        return norm.item()

    def local_bytes(self) -> int:
        """Of this rank's parameters."""
        return sum(local(p).nbytes for p in self.parameters)

    def whole(self) -> dict[str, Tensor]:
        """Every parameter whole, by name; collective."""
        if isinstance(self.wrapper, FSDP):
            return self.wrapper.gather_full_params()
        return {name: p.full_tensor() for name, p in self.model.named_parameters()}

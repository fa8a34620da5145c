"""What is timed: a model, a batch, an optimizer, and one step of them in phases."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch

from a2lib.benchmark.config import Config
from a2lib.benchmark.ranges import Nvtx, annotate
from a2lib.benchmark.result import StepTimes
from a2lib.benchmark.stopwatch import Stopwatch
from a2lib.model import TransformerLM, cross_entropy


class Workload:
    """A model, a random batch and, for a train-step, fused AdamW; ``step`` runs one step of them.

    The batch is the same in every step. A train-step drops the gradients at the end of the
    optimizer's phase; forward-backward drops them between steps, outside the clock.
    """

    def __init__(self, config: Config, device: str, nvtx: Nvtx | None = None):
        self.config, self.device = config, device
        shape = config.shape
        self.model = TransformerLM(
            shape.vocab_size,
            config.context,
            shape.d_model,
            shape.num_layers,
            shape.num_heads,
            shape.d_ff,
            attention=config.attention,
            checkpointing=config.checkpointing,
            device=device,
            seed=config.seed,
        )
        if nvtx is not None and config.nvtx == "modules":
            annotate(self.model, nvtx)
        self.forward = self.model
        if config.compile:
            self.forward = torch.compile(self.model, fullgraph=True, dynamic=False)
        generator = torch.Generator(device).manual_seed(config.seed)
        size = (2, config.batch, config.context)
        self.token_ids, self.targets = torch.randint(
            shape.vocab_size, size, generator=generator, device=device
        )
        self.optimizer = None
        if "optimizer" in config.phases:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def step(self, stopwatch: Stopwatch, name: str) -> StepTimes:
        """One step under ``name``, its phases as the mode has them."""
        loss = None
        with stopwatch.step(name) as done:
            with self._context():
                with stopwatch.phase("forward"):
                    logits = self.forward(self.token_ids)
                if "loss" in self.config.phases:
                    with stopwatch.phase("loss"):
                        loss = cross_entropy(logits, self.targets)
            del logits
            if loss is not None:
                with stopwatch.phase("backward"):
                    loss.backward()
            if self.optimizer is not None:
                with stopwatch.phase("optimizer"):
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)
        value = None if loss is None else loss.item()
        finite = value is not None and math.isfinite(value)  # JSON has no NaN
        times = dataclasses.replace(done[0], loss=value if finite else None)
        return times if self.device == "cpu" else dataclasses.replace(times, **_bytes_now())

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.config.mode == "inference":
                stack.enter_context(torch.no_grad())
            if self.config.precision == "bf16":
                cache = self.config.autocast_cache
                stack.enter_context(
                    torch.autocast(self.device, torch.bfloat16, cache_enabled=cache)
                )
            yield


def _bytes_now() -> dict[str, int]:
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
    }

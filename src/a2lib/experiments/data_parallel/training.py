"""A training step on every rank, whose gradients are averaged in one way or another, or not at all;
the wrappers and optimizers that are compared, and whether what they exchange arrives.

With a learning rate of 0 the weights stay what they are, at the work of any other step: all ways
average the same gradients, also after steps that averaged none.
"""

import contextlib
import gc
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from a2lib.experiments.data_parallel.configurations import PEERS, UPDATING, Way
from a2lib.experiments.harness import RankJob
from a2lib.experiments.steps import Configuration
from a2lib.experiments.workload.workload import Workload
from a2lib.lab.clock import Mark
from a2lib.lab.graphs import CudaGraphs
from a2lib.optim import MasterAdamW
from a2lib.parallel import DDP, BucketedDDP, FlatDDP, NaiveDDP, ShardedOptimizer, capture_step
from a2lib.parallel.copy_engines import why_not

# Atomic additions of a backward change last bits; a mean that is none is wrong by its own size.
TOLERANCE = 0.01


def still(optimizer: Optimizer) -> Optimizer:
    """With a learning rate of 0 from now on."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def on_stream(device: str) -> contextlib.AbstractContextManager:
    """The context in which a training is made and run whose step may be captured later."""
    return CudaGraphs().on_stream() if device == "cuda" else contextlib.nullcontext()


class Training:
    """The model, this rank's batch and the optimizer of ``spec`` (configurations.Setting)."""

    def __init__(self, spec: Mapping[str, object], device: str, rank: int, seed: int) -> None:
        # Captured or not, the optimizer counts its steps on the GPU.
        config = Configuration(**spec).config(device, capture=device == "cuda", seed=seed)
        self.device, self.workload = device, Workload(config, device)
        still(self.workload.optimizer)
        generator = torch.Generator(device).manual_seed(seed + 1 + rank)
        for tokens in (self.workload.token_ids, self.workload.targets):
            tokens.random_(0, config.shape.vocab_size, generator=generator)
        self.wrapper: nn.Module | None = None
        # The context of each phase, for a profiler.
        self.ranges: Callable[[str], AbstractContextManager] = contextlib.nullcontext

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.workload.model.parameters() if p.requires_grad]

    @property
    def checked(self) -> list[int]:
        """Of which of ``parameters`` what has been exchanged is checked: of those whose names
        differ in numbers alone, the first and the last."""
        kinds: dict[str, list[int]] = {}
        named = self.workload.model.named_parameters()
        for i, name in enumerate(name for name, p in named if p.requires_grad):
            kinds.setdefault(re.sub(r"\d+", "", name), []).append(i)
        return sorted({i for same in kinds.values() for i in (same[0], same[-1])})

    @contextlib.contextmanager
    def wrapped(self, wrap: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
        """Steps in this context go through ``wrap(model)``; collective."""
        self.wrapper = self.workload.forward = wrap(self.workload.model)
        try:
            yield
        finally:
            self.wrapper, self.workload.forward = None, self.workload.model
            self.workload.drop_gradients()
            gc.collect()

    @contextlib.contextmanager
    def calling(self, at: Mapping[str, Callable[[], object]]) -> Iterator[None]:
        """Steps in this context call ``at[phase]()`` when the phase begins."""

        def begin(phase: str) -> contextlib.AbstractContextManager:
            at.get(phase, lambda: None)()
            return contextlib.nullcontext()

        with mock.patch.object(self, "ranges", begin):
            yield

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Steps in this context update each bucket once it is the mean, by MasterAdamW; those
        outside of ``wrapped`` each parameter once its gradient is complete, and those in it that
        send nothing all of them after backward."""
        optimizer = still(MasterAdamW(self.parameters))
        beside = {"beside_backward": lambda: optimizer.overlapping(self.wrapper)}
        with mock.patch.multiple(self.workload, optimizer=optimizer, **beside):
            yield

    def step(
        self,
        send: bool,
        before_optimizer: Callable[[], object] = lambda: None,
        marks: Mapping[str, list[Mark]] | None = None,
    ) -> torch.Tensor:
        """One step, its loss. Where nothing is sent, gradients stay this rank's own.

        ``before_optimizer`` is called between, where the wrapper may still be asked to finish;
        ``marks`` gets those of where each phase begins and ends that has a list there.
        """
        with contextlib.ExitStack() as quiet:
            if self.wrapper is not None and not send:
                quiet.enter_context(self.wrapper.no_sync())

            @contextlib.contextmanager
            def phase(name: str) -> Iterator[None]:
                if name == "optimizer":
                    quiet.close()
                    if send:
                        with self.ranges("communication"):
                            self.finish()
                    before_optimizer()
                    if self.finishes and not send:
                        self.wrapper.reset()  # else it refuses the step
                marked = (marks or {}).get(name)
                if marked is not None:
                    marked.append(Mark(self.device))
                with self.ranges(name):
                    yield
                if marked is not None:
                    marked.append(Mark(self.device))

            return self.workload.work(phase).detach()

    def stepping(
        self, optimizer: Optimizer | None, send: bool = True, warmup: int = 0
    ) -> Callable[[], torch.Tensor]:
        """A step by ``optimizer``, or by the one that is there, taken ``warmup`` times before."""

        def step() -> torch.Tensor:
            if optimizer is not None:
                self.workload.optimizer = optimizer
            return self.step(send=send)

        for _ in range(warmup):
            step()
        return step

    @property
    def finishes(self) -> bool:
        """Whether the wrapper has a finish; PyTorch's waits in backward."""
        return hasattr(self.wrapper, "finish_gradient_synchronization")

    def finish(self) -> None:
        """Wait for the gradients that travel."""
        if self.finishes:
            self.wrapper.finish_gradient_synchronization()

    def error(self) -> float:
        """How far what comes of a step is from the mean of the ranks' gradients: the largest
        relative difference among some parameters; collective."""
        some = [self.parameters[i] for i in self.checked]
        kept: list[torch.Tensor] = []

        def keep() -> None:
            kept.extend(p.grad.clone() for p in some)

        self.step(send=False, before_optimizer=keep)
        for grad in kept:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        means, kept = kept, []
        self.step(send=True, before_optimizer=keep)
        return max(
            ((grad - mean).norm() / mean.norm().clamp(min=1e-30)).item()
            for grad, mean in zip(kept, means, strict=True)
        )

    def unlike(self) -> int:
        """Of some parameters, how many differ after a step from what their owner had; collective.

        The others' are made wrong before the update, whose learning rate is 0: the exchange has to
        put them right.
        """
        some = [self.parameters[i] for i in self.checked]
        kept = [p.detach().clone() for p in some]
        owned = own_state(self.workload.optimizer)

        def spoil() -> None:
            with torch.no_grad():
                for p in some:
                    if p not in owned:
                        p.add_(1)

        self.step(send=True, before_optimizer=spoil)
        wrong = 0
        with torch.no_grad():
            for p, right in zip(some, kept, strict=True):
                wrong += not torch.equal(p, right)
                p.copy_(right)
        return wrong

    def refusal(self, way: Way) -> str | None:
        """Why ``way`` cannot be taken here."""
        engines = way.carrier == "copy_engines"
        return why_not(None, self.parameters[0].device) if engines else None

    def make_optimizer(self, name: str) -> Optimizer:
        """Its own for "plain", else another over its parameters; collective."""
        if name == "plain":
            return self.workload.optimizer
        options = {"lr": 0.0, "fused": True, "capturable": self.device == "cuda"}
        params = self.workload.model.parameters()
        if name == "sharded":
            return ShardedOptimizer(params, torch.optim.AdamW, **options)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return still(ZeroRedundancyOptimizer(params, torch.optim.AdamW, **options))


def replayed(job: RankJob, held: contextlib.ExitStack, step: Callable) -> Callable:
    """The step, or where the job's are captured its replay, as long as ``held`` is open."""
    return held.enter_context(capture_step(step)).replay if job.spec["capture"] else step


def wrap(model: nn.Module, way: Way) -> nn.Module:
    """``model`` in the wrapper of ``way``; collective. Raises ValueError where that cannot be."""
    low = torch.bfloat16 if way.sent_dtype == "bf16" else None
    if way.wrapper in PEERS:
        peer = DistributedDataParallel(
            model,
            device_ids=[torch.cuda.current_device()] if next(model.parameters()).is_cuda else None,
            bucket_cap_mb=way.bucket_mb,
            gradient_as_bucket_view=way.wrapper == "torch_ddp_view",
        )
        if low is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            peer.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return peer
    if way.wrapper in ("bucketed", UPDATING):
        return BucketedDDP(model, way.bucket_mb, communication=way.carrier, communication_dtype=low)
    return {"naive": NaiveDDP, "flat": FlatDDP, "overlapped": DDP}[way.wrapper](model)


def own_state(optimizer: Optimizer) -> dict[nn.Parameter, dict]:
    """What this rank keeps: parameter -> its state; PyTorch's has it in an optimizer within."""
    inner = getattr(optimizer, "optim", optimizer)
    return {p: inner.state[p] for p in inner.state if "exp_avg" in inner.state[p]}

"""What is timed: a model, a batch, an optimizer, and one step of them in phases, or captured in a
CUDA graph and replayed."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from a2lib.errors import UnsupportedError
from a2lib.experiments.workload.config import Config
from a2lib.experiments.workload.ranges import Stopwatch, annotate
from a2lib.experiments.workload.result import StepTimes
from a2lib.lab.failures import classify
from a2lib.lab.graphs import CudaGraphs
from a2lib.model import Linear, TransformerLM, cross_entropy
from a2lib.optim import MasterAdamW
from a2lib.paths import quote_torch
from a2lib.theory.roofline import NARROW


class Workload:
    """A model, a random batch and, for a train-step, fused AdamW; ``step`` runs one step of them.
    AdamW is PyTorch's, or with 16-bit weights and in an overlapped step this library's.

    The batch is the same in every step. A train-step drops the gradients at the end of the
    optimizer's phase; forward-backward drops them between steps, outside the clock. With
    ``keep_gradients`` they are zeroed in place of dropped. Compiled, the
    loss is a graph of its own, so that the phases stay apart; it reads 16-bit logits and keeps no
    float32 copy of them.
    """

    def __init__(self, config: Config, device: str, nvtx=None):
        self.config, self.device = config, device
        self.model = TransformerLM.from_size(
            config.shape,
            config.context,
            attention=config.attention,
            checkpointing=config.checkpointing,
            device=device,
            seed=config.seed,
        )
        if config.weights == "zero":  # and so are activations and gradients, and stay it
            with torch.no_grad():
                torch._foreach_zero_(list(self.model.parameters()))
        if nvtx is not None and config.nvtx == "modules":
            annotate(self.model, nvtx)
        narrow = config.precision == NARROW
        products = [m.weight for m in self.model.modules() if isinstance(m, Linear)]
        self.optimizer = None
        if "optimizer" in config.phases:
            self.optimizer = self._optimizer(products, narrow)
        elif narrow:
            for weight in products:
                weight.data = weight.data.bfloat16()
        # The context of a backward.
        self.beside_backward: Callable[[], AbstractContextManager] = nullcontext
        if config.overlaps:
            self.beside_backward = self.optimizer.overlapping
        self.forward, self.loss = self.model, cross_entropy
        whole = {"fullgraph": True, "dynamic": False}
        if config.compile:
            self.forward = torch.compile(self.model, **whole)
        if config.compile_blocks:
            for block in self.model.layers:
                block.compile(**whole)
        if config.compile or config.compile_blocks:
            quote_torch()
            self.loss = torch.compile(cross_entropy, **whole)
        generator = torch.Generator(device).manual_seed(config.seed)
        size = (2, config.batch, config.context)
        self.token_ids, self.targets = torch.randint(
            config.shape.vocab_size, size, generator=generator, device=device
        )

    def _optimizer(self, products: list[Tensor], narrow: bool) -> torch.optim.Optimizer:
        if not narrow and not self.config.overlaps:
            return torch.optim.AdamW(
                self.model.parameters(), fused=True, capturable=self.config.capture
            )
        known = set(map(id, products))
        rest = [p for p in self.model.parameters() if id(p) not in known]
        working = torch.bfloat16 if narrow else None
        return MasterAdamW([{"params": products, "working_dtype": working}, {"params": rest}])

    def step(self, stopwatch: Stopwatch, name: str) -> StepTimes:
        """One step under ``name``, its phases as the mode has them."""
        with stopwatch.step(name) as done:
            loss = self.work(stopwatch.phase)
            if "loss" not in self.config.phases:
                loss = None  # logits, and with them what a backward would need
        self.drop_gradients()
        return self.with_loss(done[0], loss)

    def work(self, phase: Callable[[str], AbstractContextManager]) -> Tensor:
        """What one step computes, each part in the context ``phase(name)``; the loss, or the logits
        in a mode without one."""
        graph = torch.no_grad() if self.config.mode == "inference" else nullcontext()
        cast = nullcontext()
        if self.config.precision in ("bf16", NARROW):
            cache = self.config.autocast_cache
            cast = torch.autocast(self.device, torch.bfloat16, cache_enabled=cache)
        with graph, cast:
            with phase("forward"):
                output = self.forward(self.token_ids)
            if "loss" in self.config.phases:
                with phase("loss"):
                    output = self.loss(output, self.targets)
        if "backward" in self.config.phases:
            with phase("backward"):
                with self.beside_backward():
                    output.backward()
        if self.optimizer is not None:
            with phase("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=not self.config.keep_gradients)
        return output

    def gradients(self) -> list[Tensor]:
        """Those that there are at the moment."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def drop_gradients(self) -> None:
        """Or zero them, as the configuration has it."""
        self.model.zero_grad(set_to_none=not self.config.keep_gradients)

    def with_loss(self, times: StepTimes, loss: Tensor | None) -> StepTimes:
        """``times`` with the loss, if it is finite, and with the bytes that are now allocated."""
        value = math.nan if loss is None else loss.item()
        known = {"loss": value if math.isfinite(value) else None}  # JSON has no NaN
        if self.device == "cuda":
            known["allocated_bytes"] = torch.cuda.memory_allocated()
            known["reserved_bytes"] = torch.cuda.memory_reserved()
        return dataclasses.replace(times, **known)


class CapturedSteps:
    """Captures a step of ``workload``, replays it once, under the name ``first``, and then ``step``
    by ``step``.

    A replay launches all kernels of a step at once, so that neither Python, autograd nor the
    optimizer takes the host's time: what remains is the GPU's. The same kernels run in the same
    order on the same addresses as when they were captured; inputs are static (a new batch would be
    copied into ``workload.token_ids``), gradients live in the graph's memory and are gone for the
    host.

    Everything the workload does, from its building on, belongs on the stream of ``graphs``, and it
    has made a step before: autograd hands gradients over on the stream that first used a parameter,
    and the optimizer's state, cuBLAS and compiled kernels are made in a first step. Capturing runs
    nothing, so a replay is the step that would have come next. In the first replay the loss and
    every gradient must come back finite (see ``CudaGraphs.capture``).

    ``times`` has those of the first replay; ``graph`` is to be released. Raises what the capture
    raised, with the process made fit for further work, or graphs.Unusable where it is not;
    UnsupportedError, with the reason, where only the capture refuses the step.
    """

    def __init__(self, workload: Workload, stopwatch: Stopwatch, graphs: CudaGraphs, first: str):
        self._workload = workload
        stopwatch.where = "capture"

        def first_replay(replay) -> None:
            self.times = self._timed(replay, stopwatch, first)

        try:
            with stopwatch.ranges("capture"):
                self.graph = graphs.capture(lambda: self._work, 0, first_replay)
        except Exception as error:
            graphs.mend()
            if not isinstance(error, RuntimeError) or classify(error)[0] != "error":
                raise
            # The step before ran, so what fails here is the capture or its first replay.
            raise UnsupportedError(f"no CUDA graph of this step: {error}") from error

    def _work(self) -> list:
        """The step's work; what each replay has to write: loss or logits, and the gradients."""
        written = []

        def phase(name: str):
            if name == "optimizer":  # whose end drops the gradients
                written.extend(self._workload.gradients())
            return nullcontext()

        self._output = self._workload.work(phase).detach()
        written += [self._output, *self._workload.gradients()]
        self._workload.drop_gradients()
        return written

    def step(self, stopwatch: Stopwatch, name: str) -> StepTimes:
        """One replay: the step's times without phases; ``host_ms`` is that of its launch."""
        return self._timed(self.graph.replay, stopwatch, name)

    def _timed(self, replay, stopwatch: Stopwatch, name: str) -> StepTimes:
        with stopwatch.step(name) as done, stopwatch.phase("replay"):
            replay()
        loss = self._output if "loss" in self._workload.config.phases else None
        return self._workload.with_loss(dataclasses.replace(done[0], ms={}), loss)

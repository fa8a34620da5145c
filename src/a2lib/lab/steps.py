"""A training step of the Transformer, phase by phase: forward, loss, backward, optimizer.

    config = StepConfig(model="small", context=512, precision="bf16")
    step = TrainingStep(config, "cuda")
    step()                                  # the loss
    step(phase)                             # the same, each part within `with phase("forward"):`
    times = timed(step)
    times.ms["backward"], times.ms["wall"]  # by CUDA events, and by the host's clock

`phase` is the caller's: a range for a profiler, a peak of memory, the marks of a clock. Captured in
a CUDA graph the step has no phases:

    with graph_stream(config):
        step = TrainingStep(config, "cuda")
        step()                              # makes the optimizer's state, compiles
        replay = captured(step)
        times = timed(replay)

What a step does first costs more (loading kernels, cuBLAS, memory from the driver, compiling), so
the steps that count come after some of warm-up, and what studies first steps takes a new process.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from a2lib.checks import check_name, check_sizes
from a2lib.errors import UnsupportedError
from a2lib.lab.device import synchronize
from a2lib.lab.failures import LostContext
from a2lib.lab.memory import free_memory
from a2lib.lab.timing import Mark
from a2lib.shapes import MODELS, Shape, named_size
from a2lib.theory import roofline
from a2lib.theory.roofline import NARROW

if TYPE_CHECKING:
    from a2lib.parallel.graphs import CapturedGraph, CudaGraphs

PHASES = {
    "inference": ("forward",),
    "forward": ("forward",),
    "forward-backward": ("forward", "loss", "backward"),
    "train-step": ("forward", "loss", "backward", "optimizer"),
    "master-step": ("forward", "loss", "backward", "optimizer"),
    "overlapped-step": ("forward", "loss", "backward", "optimizer"),
}
PRECISIONS = (*roofline.PRECISIONS, NARROW)
COMPILES = ("none", "blocks", "model")
WEIGHTS = ("drawn", "zero")
Phase = Callable[[str], AbstractContextManager]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The configuration of a step. The fields are key columns of the tables of steps.

    `model` is a named size or a Shape. `mode` is inference (a forward that keeps nothing), forward
    (that keeps what a backward needs), forward-backward, train-step (with PyTorch's AdamW, or
    MasterAdamW where weights are bf16), master-step (with MasterAdamW) or overlapped-step, where
    that updates each weight while the backward goes on.
    `precision` is fp32, tf32, bf16 (autocast; weights and moments stay fp32) or bf16_weights, where
    the matrices and their gradients are bf16 and the optimizer keeps fp32 masters. `compile` is
    none, blocks (one graph that all blocks share, compiled in seconds) or model (one graph).
    `weights` zero is as much work as drawn ones, at less of a GPU's power.
    """

    model: str | Shape = "small"
    context: int = 512
    batch: int = 4
    mode: str = "train-step"
    precision: str = "fp32"
    attention: str = "eager"
    compile: str = "none"
    capture: bool = False
    checkpointing: str = "none"
    weights: str = "drawn"

    @classmethod
    def of(cls, key: Mapping[str, object]) -> Self:
        """Return the configuration that the columns of a row name."""
        fields = {}
        for field in dataclasses.fields(cls):
            if field.name in key:
                fields[field.name] = key[field.name]
        return cls(**fields)

    def __post_init__(self) -> None:
        check_sizes(context=self.context, batch=self.batch)
        check_name("mode", self.mode, PHASES)
        check_name("precision", self.precision, PRECISIONS)
        check_name("compile", self.compile, COMPILES)
        check_name("weights", self.weights, WEIGHTS)

    @property
    def shape(self) -> Shape:
        return self.model if isinstance(self.model, Shape) else named_size(self.model, MODELS)

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES[self.mode]


class TrainingStep:
    """A model, one batch of random tokens and an optimizer; a call is one step of them.

    The batch is the same in every step. A train-step drops its gradients within the optimizer's
    phase; after a forward-backward `drop_gradients()` does, outside of what is timed. All of
    `model`, `forward` (the model, compiled, or a wrapper of it), `optimizer`, `tokens`, `targets`
    and `beside_backward`, the context of a backward, may be replaced. With `keep_gradients` they
    are zeroed and keep their memory. Autocast's cache keeps a bf16 copy of each weight until the
    loss, which outlives checkpointed segments: `autocast_cache` False is for those.
    """

    def __init__(self, config: StepConfig, device: str, seed: int = 0) -> None:
        import torch

        from a2lib.model import TransformerLM, cross_entropy

        # The older of PyTorch's two settings, since Inductor reads it; it sets the newer one too.
        torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
        self.config, self.device = config, device
        self.keep_gradients, self.autocast_cache = False, config.checkpointing == "none"
        self.beside_backward: Callable[[], AbstractContextManager] = nullcontext
        self.model = TransformerLM.from_size(
            config.shape,
            config.context,
            attention=config.attention,
            checkpointing=config.checkpointing,
            device=device,
            seed=seed,
        )
        if config.weights == "zero":
            with torch.no_grad():
                torch._foreach_zero_(list(self.model.parameters()))
        self.optimizer = self._make_optimizer()
        self.forward, self.loss = self.model, cross_entropy
        self._compile()
        generator = torch.Generator(device).manual_seed(seed)
        size = (2, config.batch, config.context)
        vocabulary = config.shape.vocab_size
        self.tokens, self.targets = torch.randint(
            vocabulary, size, generator=generator, device=device
        )

    def _make_optimizer(self):
        """Return AdamW: PyTorch's fused one, or this library's where its features are asked for;
        None in a mode without an update."""
        import torch

        from a2lib.model import Linear
        from a2lib.optim import MasterAdamW

        narrow, mode = self.config.precision == NARROW, self.config.mode
        matrices = [m.weight for m in self.model.modules() if isinstance(m, Linear)]
        if "optimizer" not in self.config.phases:
            for weight in matrices if narrow else ():
                weight.data = weight.data.bfloat16()
            return None
        if not narrow and mode == "train-step":
            # A captured step counts its steps on the GPU.
            capturable = self.device == "cuda" and self.config.capture
            return torch.optim.AdamW(self.model.parameters(), fused=True, capturable=capturable)
        ids = set(map(id, matrices))
        rest = [p for p in self.model.parameters() if id(p) not in ids]
        working = torch.bfloat16 if narrow else None
        groups = [{"params": matrices, "working_dtype": working}, {"params": rest}]
        optimizer = MasterAdamW(groups)
        if mode == "overlapped-step":
            self.beside_backward = optimizer.overlapping
        return optimizer

    def _compile(self) -> None:
        """Compile the model or its blocks, and the loss as a graph of its own: phases stay apart,
        and it reads 16-bit logits without a float32 copy of them."""
        import torch

        from a2lib.paths import quote_torch

        if self.config.compile == "none":
            return
        quote_torch()  # a folder with a space in its name
        if self.config.compile == "model":
            self.forward = torch.compile(self.model, fullgraph=True, dynamic=False)
        else:
            for block in self.model.layers:
                block.compile(fullgraph=True, dynamic=False)
        self.loss = torch.compile(self.loss, fullgraph=True, dynamic=False)

    def __call__(self, phase: Phase = nullcontext):
        """Return the loss of one step, or the logits in a mode without one."""
        output = self.forward_and_backward(phase)
        self.update(phase)
        return output

    def forward_and_backward(self, phase: Phase):
        """Return the loss, or the logits, of as much of a step as makes gradients."""
        import torch

        config = self.config
        graph = torch.no_grad() if config.mode == "inference" else nullcontext()
        cast = nullcontext()
        if config.precision in ("bf16", NARROW):
            cast = torch.autocast(self.device, torch.bfloat16, cache_enabled=self.autocast_cache)
        with graph, cast:
            with phase("forward"):
                output = self.forward(self.tokens)
            if "loss" in config.phases:
                with phase("loss"):
                    output = self.loss(output, self.targets)
        if "backward" in config.phases:
            with phase("backward"), self.beside_backward():
                output.backward()
        return output

    def update(self, phase: Phase) -> None:
        """Take the optimizer's step, in a mode that has one, and drop the gradients."""
        if self.optimizer is not None:
            with phase("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=not self.keep_gradients)

    def gradients(self) -> list:
        """Return the gradients that there are at the moment."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def drop_gradients(self) -> None:
        """Drop the gradients, or zero them with `keep_gradients`."""
        self.model.zero_grad(set_to_none=not self.keep_gradients)


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one step: `ms` of each phase and of the whole "step" by the device's clock,
    and of the "wall", the host's, from an idle device to an idle one; `host_ms` of the same but the
    wall, what the host took to issue it. `loss` is None where there is no finite one."""

    ms: dict[str, float]
    host_ms: dict[str, float]
    loss: float | None


def timed(step, around: Phase = nullcontext) -> StepTimes:
    """Run one step, a TrainingStep or what `captured` returns, and return its times.

    The phases are queued without waiting in between. `around(name)` is a context that each of them
    is in as well, and so is the whole "step".
    """
    moments: dict[str, tuple[Mark, Mark]] = {}

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        with around(name):
            start = Mark(step.device)
            yield
            moments[name] = start, Mark(step.device)

    synchronize(step.device)
    with around("step"):
        begin = time.perf_counter()
        output = step(phase)
        synchronize(step.device)
        wall = 1e3 * (time.perf_counter() - begin)
    ms, host = {}, {}
    for name, (start, end) in moments.items():
        host[name] = start.host_ms_until(end)
        if not step.config.capture:  # of a replay the whole alone
            ms[name] = start.ms_until(end)
    first, _ = next(iter(moments.values()))
    _, last = next(reversed(moments.values()))
    value = output.item() if "loss" in step.config.phases else math.nan
    del output  # logits, and with them what a backward would need
    step.drop_gradients()
    ms |= {"step": first.ms_until(last), "wall": wall}
    host["step"] = sum(host.values())
    return StepTimes(ms, host, value if math.isfinite(value) else None)


def _graphs(config: StepConfig) -> "CudaGraphs":
    from a2lib.parallel.graphs import CudaGraphs

    # An update beside the backward has priority 0: the backward's kernels stand before its.
    return CudaGraphs(priority=-1 if config.mode == "overlapped-step" else 0)


def graph_stream(config: StepConfig) -> AbstractContextManager:
    """Return the context in which a step that is captured is made and run; else one that does
    nothing.

    Autograd hands a gradient over on the stream that first used its leaf, so leaves, warm-up and
    capture have one stream.
    """
    return _graphs(config).on_stream() if config.capture else nullcontext()


class CapturedStep:
    """The replay of a step: all its kernels in one launch, without Python, autograd or optimizer on
    the host. Inputs are static, gradients live in the graph's memory, and `output` is the tensor
    that each replay writes, the loss or the logits."""

    def __init__(self, step: TrainingStep, graph: "CapturedGraph", output) -> None:
        self.config, self.device, self.drop_gradients = step.config, "cuda", step.drop_gradients
        self._step, self._graph, self.output = step, graph, output

    def __call__(self, phase: Phase = nullcontext):
        """Replay; returns the loss, or the logits in a mode without one."""
        with phase("replay"):
            self._graph.replay()
        return self.output


def captured(step: TrainingStep) -> CapturedStep:
    """Capture a step that has run once, within `graph_stream`, and replay it once.

    Capturing runs nothing, so the replay is the step that would have come next. It must write the
    loss and every gradient: they are NaN before it and finite after. Raises LostContext where that
    fails, since PyTorch is not fit for more work then, because of UnsupportedError, or of what the
    capture raised where that is out of memory.
    """
    import torch

    synchronize("cuda")
    # What is left of the steps before is not in the peak of the captured one.
    free_memory("cuda")
    torch.cuda.reset_peak_memory_stats()
    outputs: list = []

    def work() -> list:
        written: list = []

        def phase(name: str) -> AbstractContextManager:
            if name == "optimizer":  # whose end drops the gradients
                written.extend(step.gradients())
            return nullcontext()

        outputs.append(step(phase).detach())
        written += [*outputs, *step.gradients()]
        step.drop_gradients()
        return written

    try:
        graph = _graphs(step.config).capture(lambda: work, calls=0)
    except torch.OutOfMemoryError as error:
        raise LostContext(f"in the capture: {error}") from error
    except RuntimeError as error:
        reason = UnsupportedError(f"no CUDA graph of this step: {error}")
        raise LostContext(str(reason)) from reason
    return CapturedStep(step, graph, outputs[-1])

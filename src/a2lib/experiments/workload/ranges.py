"""NVTX ranges by phase, by module and inside eager attention, forward and backward; and the time of
each phase, by the device's clock and by the host's.

A profiler files a kernel under the range in which it was launched, and on a GPU backward launches
from a thread of its own, outside every range of the main one. So each annotated part carries a pair
of identities: the backward of the last pushes ``<name>.bwd`` on that thread, the backward of the
first pops it. Every matrix product of backward then lies in the range of its part; what lies
between parts (sums of gradients that meet, RoPE) is in the range of the module around them.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from a2lib.experiments.workload.result import StepTimes
from a2lib.lab import synchronize
from a2lib.lab.clock import Mark


class RecordFunctions:
    """Ranges as annotations of torch.profiler, which sees no NVTX, in the place of
    ``torch.cuda.nvtx``; one stack a thread."""

    def __init__(self):
        self._open = threading.local()

    def range_push(self, name: str) -> None:
        from torch.autograd.profiler import record_function

        stack = self._open.__dict__.setdefault("stack", [])
        stack.append(record_function(name))
        stack[-1].__enter__()

    def range_pop(self) -> None:
        self._open.stack.pop().__exit__(None, None, None)


class Ranges:
    """``with ranges("forward"):`` pushes and pops by ``nvtx``, which is ``torch.cuda.nvtx``, a
    ``RecordFunctions``, or None, which does nothing."""

    def __init__(self, nvtx=None):
        self._nvtx = nvtx

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            if self._nvtx is not None:
                self._nvtx.range_push(name)
                stack.callback(self._nvtx.range_pop)
            yield


class Stopwatch:
    """Times one step after another.

        with stopwatch.step("step 0") as done:
            with stopwatch.phase("forward"):
                ...
        (times,) = done                            # StepTimes

    A step begins and ends with an idle device. Its phases are queued without waiting, and CUDA
    events around each take its time on the device. ``where`` says in words what is being done.
    """

    def __init__(self, device: str, ranges: Ranges):
        self.device, self.ranges = device, ranges
        self.where = "building the model"

    @contextmanager
    def step(self, name: str) -> Iterator[list[StepTimes]]:
        """A list that has the step's times once it is over; ``name`` is its range."""
        done: list[StepTimes] = []
        self._phases: dict[str, tuple[Mark, Mark]] = {}
        self._name = self.where = name
        synchronize(self.device)
        with self.ranges(name):
            start = time.perf_counter()
            yield done
            synchronize(self.device)
            wall_ms = (time.perf_counter() - start) * 1e3
        ms = {name: start.ms_until(end) for name, (start, end) in self._phases.items()}
        host_ms = {name: start.host_ms_until(end) for name, (start, end) in self._phases.items()}
        marks = list(self._phases.values())
        done.append(StepTimes(ms, host_ms, marks[0][0].ms_until(marks[-1][1]), wall_ms))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.where = f"{self._name}, {name}"
        with self.ranges(name):
            start = Mark(self.device)
            yield
            self._phases[name] = start, Mark(self.device)


def annotate(model, nvtx) -> None:
    """Give every module of a ``TransformerLM`` a range of its name, and the parts of its attention.

    ``layers.3.attn.attention`` holds, if attention is eager, ``.scores``, ``.softmax`` and
    ``.values`` in the place of the one call. The forward stays the same to the bit; gradients that
    meet may be added in another order. Each range costs the host some microseconds, so the times of
    such a run are not for publishing. RoPE is one module for all blocks and gets no range. Not for
    a model that is compiled or checkpointed.
    """
    from torch.nn import ModuleList

    from a2lib.model import (
        CausalMultiHeadSelfAttention,
        RotaryPositionalEmbedding,
        causal_attention,
    )

    part = _parts(nvtx)
    for name, module in model.named_modules():
        if not name or isinstance(module, ModuleList | RotaryPositionalEmbedding):
            continue
        if isinstance(module, CausalMultiHeadSelfAttention):
            inner = f"{name}.attention"
            if module.attention is causal_attention("eager"):
                module.attention = _eager_in_parts(inner, part)
            module.attention = part(inner, module.attention)
        module.forward = part(name, module.forward)


def _parts(nvtx):
    """``part(name, function)`` is the function of tensors in a range of this name, backward too."""
    from torch.autograd import Function

    class Begin(Function):
        @staticmethod
        def forward(ctx, *inputs):
            return tuple(x.view_as(x) for x in inputs)

        @staticmethod
        def backward(ctx, *gradients):
            nvtx.range_pop()
            return gradients

    class End(Function):
        @staticmethod
        def forward(ctx, name, output):
            ctx.name = name
            return output.view_as(output)

        @staticmethod
        def backward(ctx, gradient):
            nvtx.range_push(f"{ctx.name}.bwd")
            return None, gradient

    def part(name: str, function: Callable) -> Callable:
        def run(*inputs):
            with Ranges(nvtx)(name):
                # Where no input needs a gradient, Begin would have no backward that pops.
                if not any(x.requires_grad for x in inputs):
                    return function(*inputs)
                return End.apply(name, function(*Begin.apply(*inputs)))

        return run

    return part


def _eager_in_parts(name: str, part) -> Callable:
    """``attention_reference``, causal, with a range around each of its three parts: the same
    operators, so that a trace has the same kernels."""
    import math

    import torch

    def scores(q, k):
        s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))
        query = torch.arange(s.shape[-2], device=s.device)[:, None]
        return s.masked_fill(torch.arange(s.shape[-1], device=s.device) > query, float("-inf"))

    scored = part(f"{name}.scores", scores)
    softmax = part(f"{name}.softmax", lambda s: torch.softmax(s, dim=-1))
    values = part(f"{name}.values", torch.matmul)
    return lambda q, k, v: values(softmax(scored(q, k)), v)

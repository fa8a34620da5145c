"""Ranges that a profiler sees: by phase, by module, and inside eager attention; backward too.

    ranges = torch.cuda.nvtx                     # for Nsight Systems
    ranges = RecordedRanges()                    # for torch.profiler, which sees no NVTX
    annotate(step.model, ranges)                 # each module a range of its name
    step(lambda name: within(ranges, name))      # and each phase

A profiler files a kernel under the range in which it was launched, and on a GPU backward launches
from a thread of its own, outside of every module's range. So each annotated part carries a pair of
identities: the backward of the last pushes `<name>.bwd`, the backward of the first pops it. Every
matrix product of backward then lies in the range of its part; what lies between parts (sums of
gradients that meet, RoPE) is in the range of the module around them.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator


class RecordedRanges:
    """Annotations of torch.profiler in the place of `torch.cuda.nvtx`; a stack for each thread."""

    def __init__(self) -> None:
        self._open = threading.local()

    def range_push(self, name: str) -> None:
        from torch.profiler import record_function

        stack = self._open.__dict__.setdefault("stack", [])
        stack.append(record_function(name))
        stack[-1].__enter__()

    def range_pop(self) -> None:
        self._open.stack.pop().__exit__(None, None, None)


@contextlib.contextmanager
def within(ranges, name: str) -> Iterator[None]:
    """Push the range `name`, and pop it at the end of the context."""
    ranges.range_push(name)
    try:
        yield
    finally:
        ranges.range_pop()


def annotate(model, ranges) -> None:
    """Give every module of a TransformerLM a range of its name, and the parts of its attention.

    `layers.3.attn.attention` holds, if attention is eager, `.scores`, `.softmax` and `.values` in
    the place of the one call. The forward stays the same to the bit; gradients that meet may be
    added in another order. Each range costs the host some microseconds, so the times of such a run
    are not for publishing. RoPE is one module for all blocks and gets no range. A compiled graph
    loses the ranges, and a checkpoint's recomputation stops midway: not for these.
    """
    from torch.nn import ModuleList

    from a2lib.model import (
        CausalMultiHeadSelfAttention,
        RotaryPositionalEmbedding,
        causal_attention,
    )

    part = _parts(ranges)
    for name, module in model.named_modules():
        if not name or isinstance(module, ModuleList | RotaryPositionalEmbedding):
            continue
        if isinstance(module, CausalMultiHeadSelfAttention):
            inner = f"{name}.attention"
            if module.attention is causal_attention("eager"):
                module.attention = _eager_in_parts(inner, part)
            module.attention = part(inner, module.attention)
        module.forward = part(name, module.forward)


def _parts(ranges) -> Callable[[str, Callable], Callable]:
    """Return `part(name, function)`, the function of tensors in a range of that name."""
    from torch.autograd import Function

    class Begin(Function):
        @staticmethod
        def forward(ctx, *inputs):
            return tuple(x.view_as(x) for x in inputs)

        @staticmethod
        def backward(ctx, *gradients):
            ranges.range_pop()
            return gradients

    class End(Function):
        @staticmethod
        def forward(ctx, name, output):
            ctx.name = name
            return output.view_as(output)

        @staticmethod
        def backward(ctx, gradient):
            ranges.range_push(f"{ctx.name}.bwd")
            return None, gradient

    def part(name: str, function: Callable) -> Callable:
        def run(*inputs):
            with within(ranges, name):
                # Where no input needs a gradient, Begin would have no backward that pops.
                if not any(x.requires_grad for x in inputs):
                    return function(*inputs)
                return End.apply(name, function(*Begin.apply(*inputs)))

        return run

    return part


def _eager_in_parts(name: str, part: Callable) -> Callable:
    """Return causal `attention_reference` with a range around each of its three parts: the same
    operators, so that a trace has the same kernels."""
    import torch

    def scores(q, k):
        s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))
        query = torch.arange(s.shape[-2], device=s.device)[:, None]
        return s.masked_fill(torch.arange(s.shape[-1], device=s.device) > query, float("-inf"))

    scored = part(f"{name}.scores", scores)
    softmax = part(f"{name}.softmax", lambda s: torch.softmax(s, dim=-1))
    values = part(f"{name}.values", torch.matmul)
    return lambda q, k, v: values(softmax(scored(q, k)), v)

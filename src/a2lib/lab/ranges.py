"""Ranges that a profiler sees, by module and inside eager attention.

    within = torch.cuda.nvtx.range               # for Nsight Systems
    within = torch.profiler.record_function      # for torch.profiler, which sees no NVTX
    annotate(step.model, within)                 # each module a range of its name, in the forward
    step(within)                                 # and each phase

A profiler files a kernel under the range in which it was launched. A backward is launched from a
thread of its own, outside of every module's range: its kernels are the phase's.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

Within = Callable[[str], AbstractContextManager]


def annotate(model, within: Within) -> None:
    """Give every module of a TransformerLM a range of its name, and the parts of its attention.

    `layers.3.attn.attention` holds, if attention is eager, `.scores`, `.softmax` and `.values` in
    the place of the one call. What is computed stays the same to the bit. Each range costs the host
    some microseconds, so the times of such a run are not for publishing. RoPE is one module for all
    blocks and gets no range. A compiled graph loses the ranges: not for these.
    """
    from torch.nn import ModuleList

    from a2lib.model import (
        CausalMultiHeadSelfAttention,
        RotaryPositionalEmbedding,
        causal_attention,
    )

    for name, module in model.named_modules():
        if not name or isinstance(module, ModuleList | RotaryPositionalEmbedding):
            continue
        if isinstance(module, CausalMultiHeadSelfAttention):
            attention = module.attention
            if attention is causal_attention("eager"):
                attention = _eager_in_parts(f"{name}.attention", within)
            module.attention = _in_range(within, f"{name}.attention", attention)
        module.forward = _in_range(within, name, module.forward)


def _in_range(within: Within, name: str, function: Callable) -> Callable:
    """Return the function in a range of that name."""

    def run(*inputs):
        with within(name):
            return function(*inputs)

    return run


def _eager_in_parts(name: str, within: Within) -> Callable:
    """Return causal `attention_reference` with a range around each of its three parts: the same
    operators, so that a trace has the same kernels."""
    import torch

    def attention(q, k, v):
        with within(f"{name}.scores"):
            s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))
            query = torch.arange(s.shape[-2], device=s.device)[:, None]
            s = s.masked_fill(torch.arange(s.shape[-1], device=s.device) > query, float("-inf"))
        with within(f"{name}.softmax"):
            p = torch.softmax(s, dim=-1)
        with within(f"{name}.values"):
            return p @ v

    return attention

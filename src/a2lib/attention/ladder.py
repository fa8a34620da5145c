"""Our attention with its techniques taken away one by one, from the library down to a tutorial's.

    attention = at_rung("two_loops", "cuda")
    o = attention(q, k, v, is_causal=True)

A rung of ``RUNGS`` is the library without the techniques of the rungs above it, which the table of
``dispatch`` leaves out then: no kernel is another than the library's, but for the masks of the
lowest two (``naive_masks``).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from a2lib.attention.dispatch import RUNGS
from a2lib.attention.operators import passes
from a2lib.errors import UnsupportedError, none_of

HOPPER = ("one_consumer", "consumers", "one_sweep", "heads_in_l2")


def at_rung(name: str, device: str) -> Callable[..., Tensor]:
    """Return ``attention(q, k, v, is_causal)``, as high as one of ``RUNGS``, in eager mode.

    Raises ValueError for another name, UnsupportedError where the GPU has no such kernels.
    """
    if name not in RUNGS:
        raise ValueError(f"no rung {none_of(RUNGS, name)}")
    if name in HOPPER and not passes().gpu_of(torch.device(device)).is_hopper:
        raise UnsupportedError("its kernels need a GPU of compute capability 9.0")

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return _AtRung.apply(q, k, v, is_causal, name)

    return attention


class _AtRung(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, rung):
        o, lse = passes().forward(q, k, v, is_causal, None, rung)
        ctx.is_causal, ctx.rung = is_causal, rung
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        tensors = do, *ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        gradients = passes().backward(*tensors, ctx.is_causal, None, needs, ctx.rung)
        return *gradients, None, None

"""Run FlashAttention-2 in Triton kernels, as a PyTorch function.

    o = flash_attention(q, k, v, is_causal=True)          # what a model calls
    o = FlashAttentionTriton.apply(q, k, v, True)         # the handout's interface

``a2lib.attention.dispatch`` says which kernels run. Where none can, ``UnsupportedError`` says why:
no other implementation ever answers in their name.
"""

import functools

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from a2lib.attention import launches, operators
from a2lib.attention.shapes import (
    check_distinct,
    check_first_derivative,
    check_is_causal,
    check_scale,
)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute exact attention ``softmax(scale * q @ k.T) @ v`` without the N x N matrix.

    Arguments:

    - ``q``: ``(..., heads, n_queries, d)``; ``k`` and ``v``: ``(..., kv_heads, n_keys, d)``, all in
      bfloat16, float16 or float32. heads is a multiple of kv_heads (grouped-query attention), and d
      is 1 to 128. Two dimensions are one head.
    - ``is_causal``: if true, query i sees the keys j <= i.
    - ``scale``: a number above 0, ``1 / sqrt(d)`` if None. It has no gradient.

    Returns: ``(..., heads, n_queries, d)`` in q's dtype. A query that sees no key gives zeros.

    Raises:

    - TypeError or ValueError: arguments that are no tensors, or do not fit each other;
    - UnsupportedError: inputs that the kernels cannot run;
    - RuntimeError: a backward with ``create_graph=True``. There is no second derivative.

    Precision:

    - Sums are in float32. Autocast changes nothing.
    - float32 inputs are multiplied as in float32, by terms of 16 bits: three of bfloat16 or, with
      heads of more than 64 and from 256 tokens on, two of float16. PyTorch's settings of TF32
      change nothing. In a trial with one causal head of 128 (no stored rows), where q, k, v and the
      gradient were all positive, dq and dk lost a digit by the two, and somewhat less by the three.
    - The last bits of gradients may differ between runs, because some are added up in no fixed
      order. ``torch.use_deterministic_algorithms(True)`` fixes it.

    Memory:

    - Inputs may have any strides. One is copied only if its d is not contiguous, or if more than
      two leading dimensions cannot be merged.
    - With four or more dimensions, the result and the gradients lie in memory as ``(..., n_queries,
      heads, d)``: ``o.transpose(1, 2).reshape(B, n_queries, heads * d)`` copies nothing.

    Under ``torch.compile`` a call is one operator, ``torch.ops.a2lib.flash_forward``, which a
    policy of selective checkpointing can name.

    Source: FlashAttention-2 (Dao, 2023).
    """
    if scale is not None:
        scale = check_scale(scale)
    if is_causal is not True and is_causal is not False:
        is_causal = check_is_causal(is_causal)
    if is_compiling() or operators.is_watched(q, k, v):
        if not is_compiling():
            operators.check_transforms(q, k, v)
        return operators.flash_forward(q, k, v, is_causal, scale)[0]
    try:
        # What transforms of ``torch.func`` have left looks like a plain tensor, and PyTorch has no
        # public way to take it out.
        q, k, v = unwrap_if_dead(q), unwrap_if_dead(k), unwrap_if_dead(v)
    except TypeError:  # of what is no tensor: refused below
        pass
    # PyTorch's public ways to ask either take the host longer, or refuse what is no tensor.
    needs_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v)
    if needs_grad or forward_ad._current_level >= 0:
        return _apply(q, k, v, is_causal, scale)
    return _without_gradient(q, k, v, is_causal, scale)


class FlashAttentionTriton(torch.autograd.Function):
    """Run ``flash_attention`` by the handout's interface, ``apply(q, k, v, is_causal=False)``.

    Shapes, results and errors are those of ``flash_attention``; a fifth argument is its scale.
    Under ``torch.compile``, q, k and v must be three different tensors: torch 2.11 loses a gradient
    of one that is given twice.

    Saves q, k, v, o, and the natural-log log-sum-exp of each query's scores, ``q.shape[:-1]`` in
    float32.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        if scale is not None:
            scale = check_scale(scale)
        if is_causal is not True and is_causal is not False:
            is_causal = check_is_causal(is_causal)
        if is_compiling():
            check_distinct(q, k, v)
            run = operators.flash_forward
        elif operators.is_watched(q, k, v):
            run = operators.flash_forward
        elif q is k or q is v or k is v:
            # A compiled caller that was refused goes on in eager: the kernels are not traced there.
            run = _untraced_forward()
        else:
            run = launches.forward
        o, lse = run(q, k, v, is_causal, scale)
        ctx.is_causal, ctx.scale = is_causal, scale
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        check_first_derivative()
        q, k, v, o, lse = ctx.saved_tensors
        watched = is_compiling() or operators.is_watched(do, q, k, v, o, lse)
        run = operators.flash_backward if watched else launches.backward
        needs = ctx.needs_input_grad
        gradients = run(do, q, k, v, o, lse, ctx.is_causal, ctx.scale, needs[:3])
        return *gradients, *[None] * (len(needs) - 3)


# What ``apply`` calls where no transform of ``torch.func`` is at work and what transforms left of
# their tensors is unwrapped. To find that out it takes a third of a call over a short sequence.
_apply = super(torch.autograd.Function, FlashAttentionTriton).apply


def _without_gradient(q, k, v, is_causal, scale):
    # A ``Function`` takes the host longer than what it calls. Of its own, so that where a compiled
    # caller was refused this is traced, and no kernel.
    run = operators.flash_forward if is_compiling() else launches.forward
    return run(q, k, v, is_causal, scale)[0]


@functools.cache
def _untraced_forward():
    return torch.compiler.disable(launches.forward)

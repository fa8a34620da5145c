"""The two passes as registered operators, ``torch.ops.a2lib``: what tracers, modes and tensor
subclasses see of attention.

    flash_forward(q, k, v, is_causal, scale) -> (o, lse)
    flash_backward(do, q, k, v, o, lse, is_causal, scale, needs) -> (dq, dk, dv)

They have a body for every device (on the CPU Triton's interpreter, or the line that says why not),
shapes for tensors without memory, a gradient, a count of operations for FlopCounterMode, and, once
a DTensor comes, the ways in which it may be sharded. Eager calls of plain tensors that nobody looks
at do without: an operator with a gradient takes the host about twice what an autograd Function
does.
"""

import functools
import math

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode  # no public name says it
from torch.utils.flop_counter import register_flop_formula

from a2lib.attention.shapes import (
    NO_SECOND_DERIVATIVE,
    check_device,
    check_inputs,
    check_supported,
    empty_output,
)
from a2lib.errors import UnsupportedError

FORWARD, BACKWARD = "a2lib::flash_forward", "a2lib::flash_backward"
# Exact strides are the default for operators of one's own; that is written down, not relied on.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
PLAIN = (Tensor, nn.Parameter)
CHANGED = (
    "q, k, v or the output of flash_attention was changed in place before its backward, which "
    "reads them: write o = o + x for o += x"
)

torch.library.define(
    FORWARD,
    "(Tensor q, Tensor k, Tensor v, bool is_causal, float? scale) -> (Tensor o, Tensor lse)",
    tags=_TAGS,
)
torch.library.define(
    BACKWARD,
    "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool is_causal, float? scale, "
    "bool[] needs) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_TAGS,
)


def is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a call is to be seen as an operator: someone traces or counts, or the tensors
    are no plain ones with memory."""
    return (
        is_compiling()
        or torch.jit.is_tracing()
        or _get_current_dispatch_mode() is not None
        or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
        or q.is_meta
    )


@functools.cache
def passes():
    """Return the module that launches the kernels; raises UnsupportedError without Triton."""
    try:
        from a2lib.attention import passes
    except ImportError as error:
        raise UnsupportedError(f"flash_attention needs Triton, which is missing: {error}") from None
    return passes


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None):
    """The forward operator: o, and lse, which has no gradient of its own."""
    operator = torch.ops.a2lib.flash_forward.default
    if is_compiling():
        return operator(q, k, v, is_causal, scale)
    kinds = {type(x) for x in (q, k, v)}.difference(PLAIN)
    if any(kind.__module__.startswith("torch.distributed.tensor") for kind in kinds):
        _register_sharding()
    try:
        return operator(q, k, v, is_causal, scale)
    except TypeError as error:
        if "returned NotImplemented" not in str(error):
            raise
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        why = f"flash_attention runs no {names}, which does not know its operator: {FORWARD}"
        raise UnsupportedError(why) from None


def flash_backward(do, q, k, v, o, lse, is_causal, scale, needs):
    """The backward operator as a ``Function``'s backward wants it: None for what is not needed."""
    needs = list(needs)
    gradients = torch.ops.a2lib.flash_backward.default(do, q, k, v, o, lse, is_causal, scale, needs)
    return tuple(x if needed else None for x, needed in zip(gradients, needs, strict=True))


def saved_tensors(ctx) -> tuple[Tensor, ...]:
    """Return q, k, v, o and lse as the forward saved them."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(CHANGED) from None


@torch.library.impl(FORWARD, "CompositeExplicitAutograd")
def _forward(q, k, v, is_causal, scale):
    return passes().forward(q, k, v, is_causal, _positive(scale))


@torch.library.impl(BACKWARD, "CompositeExplicitAutograd")
def _backward(do, q, k, v, o, lse, is_causal, scale, needs):
    gradients = passes().backward(do, q, k, v, o, lse, is_causal, scale, needs)
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


@torch.library.register_fake(FORWARD)
def _forward_fake(q, k, v, is_causal, scale):
    check_inputs(q, k, v)
    check_supported(q)
    if q.device.type == "cpu":
        check_device(q, passes().INTERPRETED)
    return empty_output(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.register_fake(BACKWARD)
def _backward_fake(do, q, k, v, o, lse, is_causal, scale, needs):
    return tuple(
        empty_output(x) if needed else x.new_empty(0)
        for x, needed in zip((q, k, v), needs, strict=True)
    )


def _positive(scale):
    if scale is not None and not scale > 0:
        raise ValueError(f"{FORWARD} takes a scale > 0, flash_attention any; got {scale}")
    return scale


# PyTorch passes the arguments of these by name.
def _save(ctx, inputs, output):
    q, k, v, ctx.is_causal, ctx.scale = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, o, lse)


def _differentiate(ctx, do, dlse):
    if do is None:
        return None, None, None, None, None
    needs = ctx.needs_input_grad[:3]
    gradients = flash_backward(do, *saved_tensors(ctx), ctx.is_causal, ctx.scale, needs)
    return *gradients, None, None


def _refuse(ctx, *gradients):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


torch.library.register_autograd(FORWARD, _differentiate, setup_context=_save)
torch.library.register_autograd(BACKWARD, _refuse)


# Operations as PyTorch counts those of its own attention: two a multiply-add of the products, of
# which the backward has five, a causal mask or none.
@register_flop_formula(torch.ops.a2lib.flash_forward)
def _forward_flops(q, k, v, is_causal, scale, *, out_shape=None, **_):
    return 2 * _product_flops(q, k)


@register_flop_formula(torch.ops.a2lib.flash_backward)
def _backward_flops(do, q, k, v, *_, out_shape=None, **__):
    return 5 * _product_flops(q, k)


def _product_flops(q, k):
    return 2 * math.prod(q) * k[-2]


# DTensors.


@functools.cache
def _register_sharding() -> None:
    """Have DTensors run by batch or heads; what is sharded otherwise PyTorch gathers before."""
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.a2lib.flash_forward.default)
    def _forward_shardings(q, k, v, is_causal, scale):
        return [([at] * 2, [at] * 3 + [None] * 2) for at in _placements(k)]

    @register_sharding(torch.ops.a2lib.flash_backward.default)
    def _backward_shardings(do, q, k, v, o, lse, is_causal, scale, needs):
        places = _placements(k)
        if not all(needs):  # what is not needed has no dimension to be sharded
            places = places[:1]
        return [([at] * 3, [at] * 6 + [None] * 3) for at in places]


def _placements(k):
    """Return how all tensors may lie: each device has all, or some of the batch, or some heads,
    where the devices divide the heads of keys evenly."""
    from torch.distributed.tensor import Replicate, Shard

    leading = k.ndim - 2
    batches = range(leading - 1)
    places = [Replicate(), *(Shard(dim) for dim in batches)]
    if leading and k.shape[leading - 1] % k.mesh.size() == 0:
        places.append(Shard(leading - 1))
    return places

"""Define the two passes as operators that PyTorch's tools see: ``torch.ops.a2lib``.

    flash_forward(q, k, v, is_causal, scale) -> (o, lse)
    flash_backward(do, q, k, v, o, lse, is_causal, scale, needs) -> (dq, dk, dv)

A call goes through them wherever somebody looks on (``is_watched``): torch.compile, export,
make_fx, jit.trace, transforms of ``torch.func``, FakeTensorMode and other modes, subclasses of
Tensor. They have a fake implementation, a gradient and a count of FLOPs. Elsewhere the launches are
called at once, since an operator with a gradient costs the host about twice what an
``autograd.Function`` does. Traced instead, the kernels would be launched with the strides that
tensors had when they were traced, where Inductor lays them out anew; torch 2.11 does not understand
what they write, either, and computes wrong gradients without a word.

One body serves every device: on the CPU it runs in Triton's interpreter, or says why it cannot.
"""

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from a2lib.attention import launches
from a2lib.attention.shapes import (
    NO_SECOND_DERIVATIVE,
    check_inputs,
    check_scale,
    empty_output,
)
from a2lib.errors import UnsupportedError

FORWARD, BACKWARD = "a2lib::flash_forward", "a2lib::flash_backward"
# Exact strides are the default for operators of one's own; that is written down, not relied on.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

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


def _forward(q, k, v, is_causal, scale):
    if scale is not None:
        check_scale(scale)
    return launches.forward(q, k, v, is_causal, scale)


# A fake implementation looks at no device: a fake tensor may be of a GPU that is not there.
@torch.library.register_fake(FORWARD)
def _forward_fake(q, k, v, is_causal, scale):
    check_inputs(q, k, v)
    launches.check_kind(q)
    return empty_output(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _backward(do, q, k, v, o, lse, is_causal, scale, needs):
    gradients = launches.backward(do, q, k, v, o, lse, is_causal, scale, needs)
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


@torch.library.register_fake(BACKWARD)
def _backward_fake(do, q, k, v, o, lse, is_causal, scale, needs):
    return tuple(
        empty_output(x) if needed else x.new_empty(0)
        for x, needed in zip((q, k, v), needs, strict=True)
    )


@register_flop_formula(torch.ops.a2lib.flash_forward)
def _forward_flops(q_shape, k_shape, *_, **__) -> int:
    """Two matmuls of every query by every key, as PyTorch counts its own attention: a causal mask
    takes nothing away."""
    return 2 * _flops_of_a_matmul(q_shape, k_shape)


@register_flop_formula(torch.ops.a2lib.flash_backward)
def _backward_flops(do_shape, q_shape, k_shape, *_, **__) -> int:
    """Five: the scores again, dv, dp, dq and dk."""
    return 5 * _flops_of_a_matmul(q_shape, k_shape)


def _flops_of_a_matmul(q_shape, k_shape):
    return 2 * math.prod(q_shape) * k_shape[-2]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None):
    """Return o, and lse, which has no gradient of its own, by the operator."""
    check_inputs(q, k, v)  # whose own refusals PyTorch wraps
    return torch.ops.a2lib.flash_forward.default(q, k, v, is_causal, scale)


def flash_backward(do, q, k, v, o, lse, is_causal, scale, needs):
    """Return dq, dk and dv, or None for what is not needed, by the operator."""
    operator = torch.ops.a2lib.flash_backward.default
    gradients = operator(do, q, k, v, o, lse, is_causal, scale, list(needs))
    return tuple(x if needed else None for x, needed in zip(gradients, needs, strict=True))


_PLAIN = (Tensor, torch.nn.Parameter)


def is_watched(*tensors: Tensor) -> bool:
    """Return whether somebody looks on who sees operators alone, or what looks like a tensor may
    have no memory of its own: a subclass, a mode, a tracer, a transform."""
    for x in tensors:
        if type(x) not in _PLAIN:
            # What is no tensor at all is refused by those who check.
            return all(isinstance(x, Tensor) for x in tensors)
        if x.is_neg():  # the imaginary part of a conjugate, say: its memory has the other sign
            return True
    # PyTorch has no public way to ask whether there is any mode or transform.
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_torch_function_mode_enabled()
        or torch.jit.is_tracing()
    )


def check_transforms(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise UnsupportedError where a transform of ``torch.func`` would differentiate: backwards it
    wants a gradient of another kind than an operator has, and forwards the operator has none, which
    PyTorch takes for zero."""
    tensors = (q, k, v)
    forwards = forward_ad._current_level >= 0  # there is no public way to ask
    if forwards and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedError(
            "flash_attention has no derivative in forward mode (jvp, jacfwd, hessian): use "
            "attention_reference"
        )
    if torch._C._are_functorch_transforms_active() and any(x.requires_grad for x in tensors):
        raise UnsupportedError(
            "flash_attention has no gradient within torch.func (grad, vjp, jacrev): use "
            "torch.autograd.grad, or attention_reference"
        )


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
    gradients = flash_backward(do, *ctx.saved_tensors, ctx.is_causal, ctx.scale, needs)
    return *gradients, None, None


def _refuse(ctx, *gradients):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


torch.library.impl(FORWARD, "CompositeExplicitAutograd", _forward)
torch.library.impl(BACKWARD, "CompositeExplicitAutograd", _backward)


# What PyTorch calls next where nothing but the tensors' own device has a say; as numbers, which
# take a tenth of the time to compare.
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
_DEVICE_ALONE = {torch._C.DispatchKeySet(device).raw_repr() for device in _DEVICES}


class _Shortcut(torch.library.Library):
    """Register an operator's gradient so that a call that needs none and that nobody looks at (no
    tracing, no mode, no transform) goes to ``body`` at once.

    What PyTorch does around it takes the host longer than what the body does, and code that
    Inductor makes calls an operator so in both passes. There is no public way to put something
    before what ``register_autograd`` registers.
    """

    def __init__(self, body):
        super().__init__("a2lib", "FRAGMENT")
        self.body = body

    def impl(self, name, kernel, *rest, **options):
        body = self.body
        below_autograd = torch._C._after_ADInplaceOrView_keyset.raw_repr()

        def shortcut(keyset, *args):
            needs_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
            if needs_grad or keyset.raw_repr() & below_autograd not in _DEVICE_ALONE:
                return kernel(keyset, *args)
            return body(*args)

        super().impl(name, shortcut, *rest, **options)


# Held for as long as the operators are: a library takes its kernels along.
_SHORTCUTS = (_Shortcut(_forward), _Shortcut(_backward))
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_save, lib=_SHORTCUTS[0])
torch.library.register_autograd(BACKWARD, _refuse, lib=_SHORTCUTS[1])

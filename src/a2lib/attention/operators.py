"""The two passes as operators that torch.compile does not look into: ``torch.ops.a2lib``.

    flash_forward(q, k, v, is_causal, scale) -> (o, lse)
    flash_backward(do, q, k, v, o, lse, is_causal, scale, needs) -> (dq, dk, dv)

Used while compiling or exporting alone: an operator with a gradient costs the host about twice
what an ``autograd.Function`` does. Traced instead, the kernels would be launched with the strides
that tensors had when they were traced, where Inductor lays them out anew; torch 2.11 does not
understand what they write, either, and computes wrong gradients without a word.

One body serves every device: on the CPU it runs in Triton's interpreter, or says why it cannot.
"""

import torch
from torch import Tensor

from a2lib.attention import passes
from a2lib.attention.shapes import NO_SECOND_DERIVATIVE, check_inputs, empty_output

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
    return passes.forward(q, k, v, is_causal, _positive(scale))


@torch.library.register_fake(FORWARD)
def _forward_fake(q, k, v, is_causal, scale):
    check_inputs(q, k, v)
    passes.check_supported(q)
    return empty_output(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _positive(scale):
    if scale is not None and not scale > 0:
        raise ValueError(f"{FORWARD} takes a scale > 0, flash_attention any; got {scale}")
    return scale


def _backward(do, q, k, v, o, lse, is_causal, scale, needs):
    gradients = passes.backward(do, q, k, v, o, lse, is_causal, scale, needs)
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


@torch.library.register_fake(BACKWARD)
def _backward_fake(do, q, k, v, o, lse, is_causal, scale, needs):
    return tuple(
        empty_output(x) if needed else x.new_empty(0)
        for x, needed in zip((q, k, v), needs, strict=True)
    )


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None):
    """The forward operator: o, and lse, which has no gradient of its own."""
    return torch.ops.a2lib.flash_forward.default(q, k, v, is_causal, scale)


def flash_backward(do, q, k, v, o, lse, is_causal, scale, needs):
    """The backward operator as a ``Function``'s backward wants it: None for what is not needed."""
    needs = list(needs)
    gradients = torch.ops.a2lib.flash_backward.default(do, q, k, v, o, lse, is_causal, scale, needs)
    return tuple(x if needed else None for x, needed in zip(gradients, needs, strict=True))


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


class _Quick(torch.library.Library):
    """Takes a call that needs no gradient and that nobody looks at (no tracing, no mode, no
    transform) to its body at once. What PyTorch does around it takes the host longer than what the
    body does, and code that Inductor makes calls an operator so in both passes."""

    def __init__(self, body):
        super().__init__("a2lib", "FRAGMENT")
        self.body = body

    def impl(self, name, kernel, *rest, **options):
        body, below = self.body, torch._C._after_ADInplaceOrView_keyset.raw_repr()

        def quick(keyset, *args):
            wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
            if wanted or keyset.raw_repr() & below not in _REAL:
                return kernel(keyset, *args)
            return body(*args)

        super().impl(name, quick, *rest, **options)


# What is called next where nothing but the tensors' own device has a say; as numbers, which take a
# tenth of the time to compare.
_DEVICES = torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA
_REAL = {torch._C.DispatchKeySet(device).raw_repr() for device in _DEVICES}
# Held for as long as the operators are: a library takes its kernels along.
_QUICK = _Quick(_forward), _Quick(_backward)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_save, lib=_QUICK[0])
torch.library.register_autograd(BACKWARD, _refuse, lib=_QUICK[1])

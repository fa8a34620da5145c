"""Compute the head and the loss in one, without the logits of all tokens at once.

Tokens go through in chunks. Of each the logits are made, and from them at once the loss, the
gradient of the logits in their place, and from that the gradients of x and of the weight: nothing
is kept of a chunk, and backward has nothing to compute again. As an operator
(``torch.ops.a2lib.linear_cross_entropy``) it stands in a compiled graph as one call.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from a2lib.activations import CHUNK
from a2lib.attention.shapes import check_first_derivative
from a2lib.model.layers import IGNORED, check_targets, cross_entropy, outside_vocabulary

NAME = "a2lib::linear_cross_entropy"

torch.library.define(
    NAME,
    "(Tensor x, Tensor weight, Tensor targets, int chunk, bool gradients) "
    "-> (Tensor loss, Tensor dx, Tensor dweight)",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = CHUNK) -> Tensor:
    """Compute ``cross_entropy(x @ weight.T, targets)`` without all logits in memory.

    Arguments:

    - ``x``: ``(..., D)``; ``weight``: ``(V, D)``, in one floating dtype. Autocast casts both.
    - ``targets``: ``(...)``, int64, from 0 to V - 1, or -100 for a token that is left out of the
      mean (PyTorch's ``ignore_index``).
    - ``chunk``: the number of tokens whose logits are in memory at a time.

    Returns: the mean loss, a scalar in float32 (float64 for float64); NaN if no token is left.
    Logits are rounded to x's dtype; the softmax and the weight's gradient are summed in float32.

    Raises:

    - ValueError: shapes or dtypes that do not fit, no token, or a chunk below 1;
    - IndexError: a target outside the vocabulary, on a CPU. On a GPU, where a look at the targets
      would wait for the device, it makes the loss and the gradients NaN;
    - RuntimeError: a backward with ``create_graph=True``. The forward computes the gradients
      already, and they cannot be differentiated again.
    """
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            if x.is_floating_point() and x.dtype != torch.float64:
                dtype = torch.get_autocast_dtype(device)
                x, weight = x.to(dtype), weight.to(dtype)
            return linear_cross_entropy(x, weight, targets, chunk)
    if (
        (x.dim(), weight.dim()) < (1, 2)
        or x.shape[-1:] != weight.shape[1:]
        or x.shape[:-1] != targets.shape
        or targets.numel() == 0
        or x.dtype != weight.dtype
        or not x.is_floating_point()
        or chunk < 1
    ):
        raise ValueError(
            "x must be (..., D), weight (V, D) of its dtype, targets (...) of at least one token "
            f"and chunk positive; got {tuple(x.shape)} {x.dtype}, {tuple(weight.shape)} "
            f"{weight.dtype}, {tuple(targets.shape)}, {chunk}"
        )
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    rows = x.reshape(-1, x.shape[-1])
    operator = torch.ops.a2lib.linear_cross_entropy.default
    return operator(rows, weight, targets.reshape(-1), chunk, gradients)[0]


def linear_cross_entropy_plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute the same with all logits at once: the slow twin."""
    return cross_entropy(F.linear(x, weight), targets)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _forward(x, weight, targets, chunk, gradients):
    if not x.is_cuda:
        check_targets(targets, weight.shape[0])
    wide = _wide(x.dtype)
    tokens = (targets != IGNORED).sum()
    losses = x.new_zeros((), dtype=wide)
    if not gradients:
        for rows, of in zip(x.split(chunk), targets.split(chunk), strict=True):
            losses += token_losses((rows @ weight.T).to(wide), of).sum()
        return losses / tokens, x.new_empty(0), weight.new_empty(0)
    softmax = _compiled_softmax() if x.is_cuda else loss_and_gradient
    dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=wide)
    for rows, of, into in zip(x.split(chunk), targets.split(chunk), dx.split(chunk), strict=True):
        loss, dlogits = softmax(rows @ weight.T, of)
        losses += loss
        torch.mm(dlogits, weight, out=into)
        _add_product(dweight, dlogits, rows)
        del dlogits
    # Behind the products: a 16-bit dlogits / tokens may be too small to have all its digits.
    # Without a token the mean is NaN, and its gradients are zero, as PyTorch has it.
    divisor = tokens.clamp(min=1)
    return losses / tokens, dx.div_(divisor), dweight.div_(divisor).to(weight.dtype)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each token's ``-log softmax(logits)[target]``, ``(N,)`` of logits ``(N, V)``: 0 where
    the target is -100, NaN where it is outside the vocabulary."""
    vocabulary = logits.shape[-1]
    inside = targets.clamp(0, vocabulary - 1)
    loss = logits.logsumexp(-1) - logits.gather(-1, inside.unsqueeze(-1)).squeeze(-1)
    return loss.masked_fill(targets != inside, math.nan).masked_fill(targets == IGNORED, 0)


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the tokens' losses, and its gradient, of the logits' shape and dtype."""
    wide = logits.to(_wide(logits.dtype))
    lse = wide.logsumexp(-1, keepdim=True)
    here = torch.arange(logits.shape[-1], device=logits.device) == targets.unsqueeze(-1)
    dlogits = (wide - lse).exp() - here.to(wide.dtype)
    dlogits = dlogits.masked_fill((targets == IGNORED).unsqueeze(-1), 0)
    wrong = outside_vocabulary(targets, logits.shape[-1])
    dlogits = dlogits.masked_fill(wrong.unsqueeze(-1), math.nan)
    return token_losses(wide, targets).sum(), dlogits.to(logits.dtype)


@functools.cache
def _compiled_softmax():
    # Eager it would write some ten float32 copies of the logits.
    return torch.compile(loss_and_gradient, fullgraph=True, dynamic=False)


def _add_product(total: Tensor, dlogits: Tensor, rows: Tensor) -> None:
    """Add ``dlogits.T @ rows`` to total, without rounding sums to 16 bits."""
    if total.dtype == rows.dtype:
        total.addmm_(dlogits.T, rows)
    elif total.is_cuda:
        torch.addmm(total, dlogits.T, rows, out_dtype=total.dtype, out=total)
    else:  # PyTorch's CPU has no product that is wider than its operands
        total.addmm_(dlogits.T.to(total.dtype), rows.to(total.dtype))


@torch.library.register_fake(NAME)
def _fake(x, weight, targets, chunk, gradients):
    loss = x.new_empty((), dtype=_wide(x.dtype))
    if not gradients:
        return loss, x.new_empty(0), weight.new_empty(0)
    return loss, torch.empty_like(x), torch.empty_like(weight)


# PyTorch passes the arguments of these by name.
def _save(ctx, inputs, output):
    _, dx, dweight = output
    ctx.mark_non_differentiable(dx, dweight)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dx, dweight)


def _differentiate(ctx, dloss, *_):
    check_first_derivative("linear_cross_entropy has no second derivative; the _plain one has")
    if dloss is None:
        return None, None, None, None, None
    dx, dweight = ctx.saved_tensors
    x_needs, weight_needs, *_ = ctx.needs_input_grad
    dx = dx * dloss.to(dx.dtype) if x_needs else None
    dweight = dweight * dloss.to(dweight.dtype) if weight_needs else None
    return dx, dweight, None, None, None


torch.library.register_autograd(NAME, _differentiate, setup_context=_save)

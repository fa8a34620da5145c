"""The layers of a Transformer, under the course handout's names.

Weights are initialised as the course's assignment 1 asks:

- Linear: a normal distribution of variance 2 / (in + out), cut at three standard deviations;
- Embedding: the unit normal, cut at three;
- RMSNorm: ones.

Each ``reset_parameters(generator)`` draws in float32 and rounds, so that one seed means the same
weights in every dtype. (Drawn in bfloat16 a truncated normal piles up at its bounds, since the
inverse error function of a rounded 1 is infinite.)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from a2lib.checks import check_sizes

CUT = 3.0  # standard deviations at which the normal distributions are truncated
# The target of a token that is left out, as in PyTorch.
IGNORED = -100


class Linear(nn.Module):
    """Compute ``x @ weight.T`` without a bias; the weight is ``(out_features, in_features)``."""

    def __init__(self, in_features: int, out_features: int, device=None, dtype=None):
        super().__init__()
        check_sizes(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        std = math.sqrt(2 / (self.in_features + self.out_features))
        _truncated_normal_(self.weight, std, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(..., out_features)`` of x ``(..., in_features)``."""
        if _casts_while_compiling(x, self.weight):
            return _sixteen_bit_product(x, self.weight)
        return F.linear(x, self.weight)


class _SixteenBitProduct(torch.autograd.Function):
    """``x @ cat(weights).T`` of a 16-bit x and float32 weights, whose gradients are float32.

    Autocast's graph has a weight's gradient in 16 bits first and then casts it: a rounding, and
    two more passes over as much memory as all weights take.
    """

    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> Tensor:
        cast = [weight.to(x.dtype) for weight in weights]
        joined = cast[0] if len(cast) == 1 else torch.cat(cast)
        ctx.save_for_backward(x, joined)
        ctx.rows = [weight.shape[0] for weight in weights]
        return F.linear(x, joined)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, joined = ctx.saved_tensors
        a, b = dy.flatten(0, -2).t(), x.flatten(0, -2)
        # PyTorch's CPU has no product that is wider than its operands.
        gradient = torch.mm(a, b, out_dtype=torch.float32) if dy.is_cuda else (a @ b).float()
        return dy @ joined, *gradient.split(ctx.rows)


def _sixteen_bit_product(x: Tensor, *weights: Tensor) -> Tensor:
    # Cast out here, where autograd sees it: x's gradient takes x's dtype.
    return _SixteenBitProduct.apply(x.to(torch.get_autocast_dtype(x.device.type)), *weights)


def _casts_while_compiling(x: Tensor, *weights: Tensor) -> bool:
    """Return whether a graph is traced in which autocast makes 16-bit copies of these weights."""
    device = x.device.type
    return (
        torch.compiler.is_compiling()
        and torch.is_autocast_enabled(device)
        and torch.get_autocast_dtype(device) in (torch.bfloat16, torch.float16)
        and all(weight.dtype == torch.float32 for weight in weights)
        and x.dim() > 1
    )


def side_by_side(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """Return ``linear(x)`` of each, by one matrix product where joining the weights pays.

    It pays in a compiled graph under 16-bit autocast: weights in float32 are copied there in any
    case, and the casts write into one matrix; those in 16 bits are copied where the products are
    narrow. The backward then has one product for x in the place of several and their sum. Where a
    Linear is replaced, hooked or there twice, each is called by itself.
    """
    if not torch.compiler.is_compiling() or not _are_plain(linears):
        return tuple(linear(x) for linear in linears)
    weights = [linear.weight for linear in linears]
    if _casts_while_compiling(x, *weights):
        y = _sixteen_bit_product(x, *weights)
    elif _narrow_weights(x, *weights):
        y = F.linear(x, torch.cat(weights))
    else:
        return tuple(linear(x) for linear in linears)
    return y.split([linear.out_features for linear in linears], dim=-1)


def _are_plain(linears: tuple[Linear, ...]) -> bool:
    """Return whether nothing but their weights is in these, each another one."""
    for i, linear in enumerate(linears):
        # PyTorch has no public name for the hooks that are registered.
        if type(linear) is not Linear or linear._forward_hooks or linear._forward_pre_hooks:
            return False
        for earlier in linears[:i]:
            # Compared as tensors: a graph that asks who a module is serves that module alone.
            if linear.weight is earlier.weight:
                return False
    return True


def _narrow_weights(x: Tensor, *weights: Tensor) -> bool:
    """Return whether these are 16-bit weights, in autocast, of products so narrow that each alone
    leaves much of a GPU idle: then a copy of them costs less. A wide one fills the GPU."""
    device = x.device.type
    return (
        torch.is_autocast_enabled(device)
        and all(weight.dtype == torch.get_autocast_dtype(device) for weight in weights)
        and all(weight.shape[0] <= weight.shape[1] for weight in weights)
    )


class Embedding(nn.Module):
    """Look up rows of the weight ``(num_embeddings, embedding_dim)`` by token id.

    An id outside the table raises IndexError on a CPU. On a GPU, where a look at the ids would wait
    for the device, it is a device-side assertion.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, device=None, dtype=None):
        super().__init__()
        check_sizes(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.weight = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        _truncated_normal_(self.weight, 1.0, generator)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return ``(..., embedding_dim)`` of token_ids ``(...)``, int64 or int32.

        Raises ValueError for another dtype.
        """
        if token_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"token ids must be int64 or int32; got {token_ids.dtype}")
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """Compute ``weight * x / sqrt(mean(x**2) + eps)`` over the last dimension.

    Returns x's shape and dtype. It is computed in float32 (float64 for float64), also under
    autocast: the squares of a 16-bit x lose bits, and overflow in float16.

    Source: Zhang and Sennrich, 2019.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, device=None, dtype=None):
        super().__init__()
        check_sizes(d_model=d_model)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x ``(..., d_model)``, in the same shape and dtype."""
        wide = _at_least_float32(x)
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normalised * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """Compute ``w2(silu(w1 x) * w3 x)``, with three matrices of d_model x d_ff.

    Source: Shazeer, 2020.
    """

    def __init__(self, d_model: int, d_ff: int, device=None, dtype=None):
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device, dtype)
        self.w2 = Linear(d_ff, d_model, device, dtype)
        self.w3 = Linear(d_model, d_ff, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(..., d_model)`` of x ``(..., d_model)``."""
        gate, value = side_by_side(x, self.w1, self.w3)
        return self.w2(F.silu(gate) * value)


class RotaryPositionalEmbedding(nn.Module):
    """Rotate the pair ``(x[2i], x[2i + 1])`` at position p by ``p * theta**(-2i / d_k)``.

    Arguments:

    - ``theta``: the base, a positive number;
    - ``d_k``: the head size, even;
    - ``max_seq_len``: the number of positions.

    The cosines and sines are two tables ``(max_seq_len, d_k / 2)``, buffers outside the state dict.
    They stay in float32 (float64 in a float64 model) when the module is cast to 16 bits, and
    ``to_empty`` computes them anew.

    Raises ValueError for sizes or a theta that cannot be.

    Source: RoFormer (Su et al., 2021), equation 34.
    """

    def __init__(self, theta: float, d_k: int, max_seq_len: int, device=None, dtype=None):
        super().__init__()
        check_sizes(d_k=d_k, max_seq_len=max_seq_len)
        if d_k % 2:
            raise ValueError(f"d_k is {d_k}; RoPE turns pairs, so it must be even")
        if not (math.isfinite(theta) and theta > 0):
            raise ValueError(f"theta is {theta!r}; it must be a positive finite number")
        self.theta, self.d_k, self.max_seq_len = theta, d_k, max_seq_len
        self._tabulate(torch.empty(0, device=device, dtype=dtype))

    def _tabulate(self, like: Tensor) -> None:
        """Fill the tables on the device of ``like``, in its dtype or float32, the wider."""
        exact = {"dtype": torch.float64, "device": like.device}
        frequencies = self.theta ** (-torch.arange(0, self.d_k, 2, **exact) / self.d_k)
        angles = torch.outer(torch.arange(self.max_seq_len, **exact), frequencies)
        kept = _at_least_float32(like).dtype
        self.register_buffer("cos", angles.cos().to(kept), persistent=False)
        self.register_buffer("sin", angles.sin().to(kept), persistent=False)

    def _apply(self, fn, recurse=True):
        like = fn(self.cos.new_empty(0))
        if (like.device, _at_least_float32(like).dtype) != (self.cos.device, self.cos.dtype):
            self._tabulate(like)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return x ``(..., T, d_k)``, of positions 0 to T - 1, rotated, in its dtype; computed in
        float32 at least. Raises ValueError where T or d_k does not fit."""
        length, features = x.shape[-2:]
        if features != self.d_k:
            raise ValueError(f"x has {features} features; RoPE was made for d_k = {self.d_k}")
        if not 1 <= length <= self.max_seq_len:
            allowed = f"allowed are 1 to {self.max_seq_len} (the context)"
            raise ValueError(f"a sequence of {length} tokens; {allowed}")
        cos, sin = self.cos[:length], self.sin[:length]
        pairs = _at_least_float32(x).unflatten(-1, (-1, 2))
        if torch.compiler.is_compiling():
            # A kernel reads each number beside its partner; stacked halves make Inductor's backward
            # compute every half for every number.
            swapped = pairs.flip(-1) * torch.stack((-sin, sin), dim=-1)
            return (pairs * cos.unsqueeze(-1) + swapped).flatten(-2).to(x.dtype)
        even, odd = pairs.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the mean of ``-log softmax(logits)[target]``, a scalar, by PyTorch's function.

    Arguments:

    - ``logits``: ``(..., V)``. Those in 16 bits are cast to float32 first, as autocast would.
    - ``targets``: ``(...)``, int64, from 0 to V - 1, or -100 for a token that is left out of the
      mean. The loss is NaN if no token is left.
    - ``reduction``: "mean" or "sum".

    Raises:

    - ValueError: shapes that do not fit, or no token;
    - IndexError: a target outside the vocabulary, on a CPU. In a compiled graph and on a GPU, where
      a look at the targets would wait for the device, it makes the loss and its gradients NaN.
    """
    if logits.dim() < 1 or logits.shape[:-1] != targets.shape or targets.numel() == 0:
        raise ValueError(
            "logits must be (..., vocabulary) and targets (...) of at least one token; got "
            f"{tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    vocabulary = logits.shape[-1]
    rows, targets = _at_least_float32(logits).reshape(-1, vocabulary), targets.reshape(-1)
    if logits.is_cpu and not torch.compiler.is_compiling():
        try:
            return F.cross_entropy(rows, targets, reduction=reduction)
        except IndexError:
            check_targets(targets, vocabulary)
            raise
    wrong = outside_vocabulary(targets, vocabulary)
    loss = F.cross_entropy(rows, targets.masked_fill(wrong, IGNORED), reduction=reduction)
    return loss * torch.where(wrong.any(), math.nan, 1.0)


def outside_vocabulary(targets: Tensor, vocabulary: int) -> Tensor:
    """Return which targets are neither of the vocabulary nor left out."""
    return ((targets < 0) & (targets != IGNORED)) | (targets >= vocabulary)


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """Raise IndexError for a target outside the vocabulary; waits for the device."""
    wrong = outside_vocabulary(targets, vocabulary)
    if wrong.any():
        raise IndexError(
            f"target {targets[wrong][0].item()}: allowed are 0 to {vocabulary - 1}, and {IGNORED}"
            " for a token that is left out"
        )


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@torch.no_grad()
def _truncated_normal_(weight: Tensor, std: float, generator: torch.Generator | None) -> None:
    if weight.is_meta:
        return
    drawn = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    nn.init.trunc_normal_(drawn, 0.0, std, -CUT * std, CUT * std, generator=generator)
    weight.copy_(drawn)

"""A block of a Transformer around an attention, for comparing torch.compile with eager by name.

q, k and v are made in each of the ways of FORMS, since what torch.compile gets wrong depends on
how they lie in memory and on which tensor they come from.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from a2lib.attention import (
    FlashAttentionPyTorch,
    FlashAttentionTriton,
    attention_reference,
    flash_attention,
)


def _chunk(y, heads):
    return [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in y.chunk(3, -1)]


def fused(y, heads):
    return y.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def chunk(y, heads):
    return _chunk(y, heads)


def gqa(y, heads):
    width = y.shape[-1] // 3
    parts = y[..., : 2 * width].split((width, width // 2, width // 2), -1)
    counts = heads, heads // 2, heads // 2
    return [x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip(parts, counts, strict=True)]


def contiguous(y, heads):
    return [x.contiguous() for x in _chunk(y, heads)]


def rope(y, heads):
    q, k, v = fused(y, heads)
    positions = torch.arange(y.shape[1], device=y.device)[:, None]
    angle = positions * 0.1 ** torch.arange(q.shape[-1] // 2, device=y.device)
    cos, sin = angle.cos().to(y.dtype), angle.sin().to(y.dtype)

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(v.dtype)

    return rotate(q), rotate(k), v


def rms_norm(y, heads):
    q, k, v = fused(y, heads)
    return *(F.rms_norm(x, x.shape[-1:]).to(v.dtype) for x in (q, k)), v


def three_dimensions(y, heads):
    return [x.flatten(0, 1) for x in _chunk(y, heads)]


def frozen(y, heads):
    q, k, v = fused(y, heads)
    return q, k.detach(), v.detach()


def q_is_k(y, heads):
    q, _, v = fused(y, heads)
    return q, q, v


def all_one(y, heads):
    q, _, _ = fused(y, heads)
    return q, q, q


DISTINCT = (fused, chunk, gqa, contiguous, rope, rms_norm, three_dimensions, frozen)
FORMS = (*DISTINCT, q_is_k, all_one)


def ours(q, k, v):
    return flash_attention(q, k, v, is_causal=True)


def handout(q, k, v):
    return FlashAttentionTriton.apply(q, k, v, True)


def tiled(q, k, v):
    return FlashAttentionPyTorch.apply(q, k, v, True)


def reference(q, k, v):
    return attention_reference(q, k, v, True)


class Block(nn.Module):
    """``x + proj(attention(form(qkv(x))))`` over (B, T, D)."""

    def __init__(self, form, attention, heads=4, head_dim=16):
        super().__init__()
        self.form, self.attention, self.heads = form, attention, heads
        width = heads * head_dim
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        o = self.attention(*self.form(self.qkv(x), self.heads))
        return x + self.proj(o.view(B, self.heads, T, -1).transpose(1, 2).reshape(B, T, D))


def pair(form, attention, dtype, device="cpu", **sizes):
    """The block, and the same weights in float64 around the definition."""
    torch.manual_seed(0)
    block = Block(form, attention, **sizes).to(device, dtype)
    truth = Block(form, reference, **sizes).to(device, torch.float64)
    truth.load_state_dict(block.state_dict())
    return block, truth


def inputs(block, length, seed=1, batch=2):
    """x and the gradient of the block's output, from the unit normal distribution."""
    weight = block.proj.weight
    torch.manual_seed(seed)
    x, dy = torch.randn(2, batch, length, weight.shape[0], device=weight.device).to(weight.dtype)
    return x, dy


def by_name(call, block, x, dy, autocast=False):
    """Output and gradients of ``call(x)`` by name; call is the block, or compiled from it."""
    x = x.to(block.proj.weight.dtype).requires_grad_()
    names = ("x", "qkv", "proj")
    context = (
        torch.autocast(x.device.type, torch.bfloat16) if autocast else contextlib.nullcontext()
    )
    with context:
        y = call(x)
    wanted = (x, block.qkv.weight, block.proj.weight)
    gradients = torch.autograd.grad(y, wanted, dy.to(y.dtype))
    return {"output": y.detach(), **dict(zip(names, gradients, strict=True))}


def worst(got, want):
    """Relative error of each name, NaN if it is."""
    return {
        name: ((got[name].double() - x.double()).norm() / x.double().norm()).item()
        for name, x in want.items()
    }


def assert_close(got, want, tolerance, cell):
    for name, error in worst(got, want).items():
        assert error <= tolerance, f"{cell}: {name} is off by {error:.2e}, beyond {tolerance}"

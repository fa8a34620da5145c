"""A block of a Transformer around an attention, for comparing torch.compile with eager by name.

q, k and v are made in each of the ways of FORMS, since what torch.compile gets wrong depends on
how they lie in memory and on which tensor they come from. What is shared by the tests on a CPU, in
the interpreter, and those on a GPU.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from attention_compare import off_by
from torch import nn

from a2lib.attention import FlashAttentionPyTorch, FlashAttentionTriton, attention_reference, flash


def fused(y, heads):
    return y.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def chunk(y, heads):
    return [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in y.chunk(3, -1)]


def gqa(y, heads):
    width = y.shape[-1] // 3
    parts = y[..., : 2 * width].split((width, width // 2, width // 2), -1)
    counts = heads, heads // 2, heads // 2
    return [x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip(parts, counts, strict=True)]


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
    return [x.flatten(0, 1) for x in chunk(y, heads)]


def frozen(y, heads):
    q, k, v = fused(y, heads)
    return q, k.detach(), v.detach()


def q_is_k(y, heads):
    q, _, v = fused(y, heads)
    return q, q, v


def all_one(y, heads):
    q, _, _ = fused(y, heads)
    return q, q, q


# Weights' dtype and whether autocast to bfloat16 is on.
KINDS = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "autocast": (torch.float32, True),
}
# Relative error beside float64. A gradient with a wrong stride or a lost term is off by tens of
# percent.
TRUTH = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2, "autocast": 5e-2}

DISTINCT = (fused, chunk, gqa, rope, rms_norm, three_dimensions, frozen)
FORMS = (*DISTINCT, q_is_k, all_one)


def ours(q, k, v):
    return flash.flash_attention(q, k, v, is_causal=True)


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
    """Return the block, and the same weights in float64 around the definition."""
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


def assert_close(got, want, tolerance, cell):
    """Assert that the relative error of each name is within `tolerance`; NaN is not."""
    for name, x in want.items():
        error = off_by(got[name], x.double())
        assert error <= tolerance, f"{cell}: {name} is off by {error:.2e}, beyond {tolerance}"


@pytest.fixture(autouse=True)
def fresh():
    """Float32 products of cuBLAS as exact as ours, and nothing compiled before."""
    torch._dynamo.reset()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)
    torch._dynamo.reset()


def named(value):
    return getattr(value, "__name__", None)


def check(form, attention, kind, lengths, eager, *, device="cpu", repeats=1, sizes=None, **options):
    """A compiled block beside float64, and beside itself in eager within eager[kind] if given."""
    dtype, autocast = KINDS[kind]
    block, truth = pair(form, attention, dtype, device, **(sizes or {}))
    call = torch.compile(block, fullgraph=True, **options)
    for length in lengths:
        x, dy = inputs(block, length)
        want = by_name(truth, truth, x, dy)
        plain = by_name(block, block, x, dy, autocast) if kind in eager else None
        for again in range(repeats):
            if device == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            got = {name: y.clone() for name, y in by_name(call, block, x, dy, autocast).items()}
            cell = f"{form.__name__}, {attention.__name__}, {kind}, {length} tokens, run {again}"
            assert_close(got, want, TRUTH[kind], f"{cell}, float64")
            if plain is not None:
                assert_close(got, plain, eager[kind], f"{cell}, eager")


def check_given_twice(form, attention, length, device="cpu", **options):
    """One graph refuses one tensor given twice with our words; graph breaks give its gradient."""
    block, truth = pair(form, attention, torch.float32, device)
    x, dy = inputs(block, length)
    with pytest.raises(Exception, match="three different tensors|UnsupportedError|duplicate"):
        torch.compile(block, fullgraph=True, **options)(x)
    torch._dynamo.reset()
    got = by_name(torch.compile(block, **options), block, x, dy)
    assert_close(got, by_name(truth, truth, x, dy), TRUTH["fp32"], form.__name__)

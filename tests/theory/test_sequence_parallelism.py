"""Sequence parallelism on devices made of lists: same values and gradients, so many messages."""

from collections import Counter

import pytest
import torch
from plan_toys import TOY, job

from a2lib.theory import layout_time
from a2lib.theory.layouts import Layout

DEVICES, TOKENS, WIDTH, HIDDEN = 4, 8, 6, 12


class Scatter(torch.autograd.Function):
    """The sum of all devices' terms, a part of its rows on each; the backward is a gather."""

    @staticmethod
    def forward(ctx, sent, *terms):
        ctx.sent = sent
        sent["scatter"] += 1
        return sum(terms).chunk(len(terms))

    @staticmethod
    def backward(ctx, *gradients):
        ctx.sent["gather"] += 1
        return None, *(torch.cat(gradients) for _ in gradients)


class Columns(torch.autograd.Function):
    """Products of gathered rows with each device's columns, of which only the parts are kept: the
    backward gathers them once more for the weights' gradients."""

    @staticmethod
    def forward(ctx, sent, *given):
        parts, weights = given[:DEVICES], given[DEVICES:]
        ctx.sent = sent
        ctx.save_for_backward(*given)
        sent["gather"] += 1
        whole = torch.cat(parts)
        return tuple(whole @ w for w in weights)

    @staticmethod
    def backward(ctx, *gradients):
        parts, weights = ctx.saved_tensors[:DEVICES], ctx.saved_tensors[DEVICES:]
        ctx.sent["gather"] += 1
        whole = torch.cat(parts)
        ctx.sent["scatter"] += 1
        back = sum(g @ w.T for g, w in zip(gradients, weights, strict=True)).chunk(DEVICES)
        return None, *back, *(whole.T @ g for g in gradients)


def norm(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def halves(x, weights):
    """Attention and FFN of a block, as far as sums go: a norm, two products, a residual."""
    for w_in, w_out in weights:
        x = x + torch.tanh(norm(x) @ w_in) @ w_out
    return x


def by_sequence(parts, weights, sent):
    for w_in, w_out in weights:
        columns = w_in.chunk(DEVICES, 1)
        hidden = Columns.apply(sent, *map(norm, parts), *columns)
        terms = [torch.tanh(h) @ w for h, w in zip(hidden, w_out.chunk(DEVICES), strict=True)]
        added = Scatter.apply(sent, *terms)
        parts = [x + y for x, y in zip(parts, added, strict=True)]
    return parts


def test_a_block_cut_by_tokens_is_the_same_block_for_ten_rings():
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = [tuple(torch.randn(size, dtype=torch.float64, requires_grad=True)
                     for size in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))) for _ in range(2)]  # fmt: skip
    up = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    given = [x, *(w for pair in weights for w in pair)]
    expected = halves(x, weights)
    gradients = torch.autograd.grad(expected, given, up)
    sent = Counter()
    parts = by_sequence(x.chunk(DEVICES), weights, sent)
    assert sent == {"gather": 2, "scatter": 2}
    assert all(len(part) == TOKENS // DEVICES for part in parts)
    torch.testing.assert_close(torch.cat(parts), expected)
    found = torch.autograd.grad(torch.cat(parts), given, up)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert sent == {"gather": 6, "scatter": 4}
    # as many as the planner counts for a block of neither end
    slow = job(device=TOY)
    waited, _ = layout_time._waited(slow, Layout(tensor=2), 4, 1, False, False)
    ring = 2 * 4 * 4 / 2 / 10  # of two devices: half of 2 bytes a number, four tokens 4 wide
    assert waited[0] == pytest.approx(sum(sent.values()) * ring)

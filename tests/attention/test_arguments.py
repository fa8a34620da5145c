"""Arguments that cannot be meant, derivatives that are not there, and what autocast does."""

import functools

import numpy as np
import pytest
import torch
from attention_compare import NAMES, laid_out, random_inputs, with_gradients
from refusals import refused
from torch.autograd import forward_ad

from a2lib.attention import FlashAttentionPyTorch, FlashAttentionTriton, attention_reference, flash

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")


def keyword(q, k, v, is_causal=False):
    return flash.flash_attention(q, k, v, is_causal=is_causal)


EVERY = {
    "reference": attention_reference,
    "tiled": FlashAttentionPyTorch.apply,
    "triton": FlashAttentionTriton.apply,
    "flash_attention": keyword,
}
every = pytest.mark.parametrize("attention", EVERY.values(), ids=EVERY)
once = {name: attention for name, attention in EVERY.items() if name != "reference"}
differentiable_once = pytest.mark.parametrize("attention", once.values(), ids=once)


def three(*shape):
    return torch.randn(3, *shape).unbind(0)


@every
def test_is_causal_is_a_bool(attention):
    for value in ("False", "True", "", None, 0, 1, 1.0, torch.tensor(True)):
        words = "is_causal must be True or False; got"
        refused(words, attention, *three(2, 8, 16), value, error=TypeError)


@pytest.mark.parametrize("attention", [attention_reference, flash.flash_attention])
def test_scale_is_a_finite_number_above_0(attention):
    for scale, kind, complaint in (
        (torch.tensor(0.5), TypeError, "no gradient"),
        ("0.5", TypeError, "a number or None; got '0.5'"),
        (float("nan"), ValueError, "finite number.*; got nan"),
        (1e39, ValueError, "finite number.*; got 1e\\+39"),
        (0.0, ValueError, "above 0"),
        (-0.5, ValueError, "above 0"),
    ):
        words = f"scale must be .*{complaint}"
        refused(words, attention, *three(2, 8, 16), scale=scale, error=kind)


@on_cpu
def test_numbers_of_numpy_are_taken():
    q, k, v = three(2, 8, 16)
    got = flash.flash_attention(q, k, v, is_causal=np.bool_(True), scale=np.float32(0.5))
    want = attention_reference(q, k, v, True, scale=0.5)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


SHAPES = [
    ([(2, 8, 16), (2, 8, 32), (2, 8, 32)], "same head_dim"),
    ([(2, 8, 16), (2, 8, 16), (2, 9, 16)], "k and v must have the same shape"),
    ([(2, 8, 16), (8, 16), (8, 16)], "one rank"),
    ([(3, 8, 16), (2, 8, 16), (2, 8, 16)], "whole multiple"),
    ([(2, 4, 8, 16), (1, 4, 8, 16), (1, 4, 8, 16)], "leading dimensions"),
    ([(2, 4, 8, 16), (2, 0, 8, 16), (2, 0, 8, 16)], "whole multiple"),
    ([(2, 8, 0), (2, 8, 0), (2, 8, 0)], "head_dim must be at least 1; got q"),
]


@every
def test_shapes_and_dtypes_that_do_not_fit(attention):
    for shapes, complaint in SHAPES:
        refused(complaint, attention, *map(torch.zeros, shapes), False)
    x = torch.zeros(1, 8, 16)
    refused("one dtype", attention, x, x.half(), x.half(), False)
    refused("floating-point", attention, x.int(), x.int(), x.int(), False)


@every
def test_what_is_no_tensor(attention):
    q, k, v = three(2, 8, 16)
    words = "q, k and v must be PyTorch tensors; got"
    for inputs in ((None, k, v), (q, k.numpy(), v), (q, k, [[1.0]])):
        refused(words, attention, *inputs, error=TypeError)


@on_cpu
@differentiable_once
def test_gradients_are_not_computed_for_differentiating_them(attention):
    """Each would be missing the part that goes through the saved q, k, v, or be zero."""
    q, k, v = three(2, 8, 16)
    q.requires_grad_()
    no = functools.partial(refused, "no second derivative.*attention_reference", error=RuntimeError)

    def gradient(create_graph):
        return torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=create_graph)

    assert not gradient(False)[0].requires_grad
    no(gradient, True)
    no(attention(q, k, v).sum().backward, create_graph=True)

    def loss(x):
        return attention(x, k, v).square().sum()

    no(torch.autograd.functional.hessian, loss, q)


def test_the_reference_has_a_second_derivative():
    q, k, v = (x.double() for x in three(1, 3, 2))
    q.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda q: attention_reference(q, k, v, True), (q,))


@on_cpu
@every
def test_autocast(attention):
    """The reference is made of products, which autocast runs in 16 bits; the others stay as is."""
    inputs = random_inputs((2, 8, 16), (2, 8, 16), torch.float32)
    outside = with_gradients(attention, *inputs, True)
    with torch.autocast("cpu", torch.bfloat16):
        if attention is attention_reference:
            assert attention(*inputs[:3], True).dtype == torch.bfloat16
        else:
            inside = with_gradients(attention, *inputs, True)
            for name in NAMES:
                assert torch.equal(inside[name], outside[name]), name
        q, k, v, _ = inputs
        with pytest.raises(ValueError, match="one dtype"):
            attention(q, k.bfloat16(), v.bfloat16(), True)


def expected_strides(shape):
    """Strides of (..., H, N, d) in memory as (..., N, H, d); contiguous below rank 4."""
    if len(shape) < 4:
        return torch.empty(shape).stride()
    *batch, H, N, d = shape
    return torch.empty(*batch, N, H, d).transpose(-2, -3).stride()


@on_cpu
@pytest.mark.parametrize("layout", ["transposed", "sliced"])
@pytest.mark.parametrize("rank", [2, 4, 5])
def test_results_lie_as_their_shape_says(rank, layout):
    """Whatever the strides of the inputs; torch.compile relies on it, and models merge heads."""
    inputs = []
    for x in random_inputs((2, 4, 9, 16), (2, 2, 7, 16), torch.float16):
        x = laid_out(x, layout)
        inputs.append({2: x[0, 0], 4: x, 5: x.expand(2, *x.shape)}[rank])
    q, k, v, _ = inputs
    results = with_gradients(FlashAttentionTriton.apply, *inputs, True)
    for name, like in zip(NAMES, (q, q, k, v), strict=True):
        assert results[name].stride() == expected_strides(like.shape), name


@on_cpu
def test_a_tangent_is_refused_and_not_lost():
    q, k, v = three(2, 4, 9, 16)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp|forward"):
        flash.flash_attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_the_tiled_one_has_a_shape_without_memory():
    q = torch.empty(2, 8, 16, device="meta")
    assert FlashAttentionPyTorch.apply(q, q, q).shape == q.shape

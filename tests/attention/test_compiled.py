"""Attention under torch.compile, with the kernels in Triton's interpreter: gradients by name."""

import functools
from unittest.mock import Mock

import attention_blocks as blocks
import pytest
import torch
from attention_blocks import fresh, fused, gqa, handout, inputs, named, ours, tiled  # noqa: F401
from attention_compare import laid_out, random_inputs, with_gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint as checkpoints
from torch.utils._pytree import tree_map_only

from a2lib.attention import FlashAttentionTriton, flash_attention, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")

# Beside eager, which rounds alike but for what Inductor fuses, where that says more than float64.
EAGER = {"bf16": 1e-2, "autocast": 1e-2}


def check(form, attention, lengths, kind="fp32", **options):
    blocks.check(form, attention, kind, lengths, EAGER, sizes={"heads": 2}, **options)


# How q, k and v lie is the form's, whatever their dtype: in float16, which the interpreter does in
# a third of float32's time, and whose bounds are far below what a lost term or stride would do.
# tests/gpu has every form in float32.
LENGTHS = dict.fromkeys((gqa, blocks.rope, blocks.three_dimensions), (20, 33))
LENGTHS[fused] = 20, 33, 48


@pytest.mark.parametrize("form", blocks.FORMS, ids=named)
def test_gradients_as_the_length_changes(form):
    """The first call is static, the second compiles again; a third runs what the second made.
    Again for what computes with the length, flattens or groups; the others lie as these do."""
    check(form, ours, LENGTHS.get(form, (33,)), "fp16", backend="aot_eager")


@pytest.mark.parametrize("form, attention, length, kind", [
    # The one form whose results have float32's bound: what is lost beside a sum shows there.
    (fused, ours, 33, "fp32"),
    # Dynamo traces the function where the other is an operator: groups, and what needs no
    # gradient; and of the tiled one, of which nothing is opaque, its passes line by line.
    (gqa, handout, 33, "fp16"), (blocks.frozen, handout, 33, "fp16"),
    (fused, tiled, 70, "fp32"),
    # Of what is 16 bits wide when it arrives, and of what the form made float32 in between.
    (fused, ours, 33, "autocast"), (blocks.rms_norm, ours, 33, "autocast"),
], ids=named)  # fmt: skip
def test_gradients_of_one_length(form, attention, length, kind):
    check(form, attention, (length,), kind, backend="aot_eager")


@pytest.mark.parametrize("attention", [ours, handout])
def test_gradients_in_bfloat16_with_every_size_dynamic(attention):
    check(fused, attention, (33, 48), "bf16", backend="aot_eager", dynamic=True)


def both(q, k, v):
    """The operator on one head, the function on the other in three dimensions: in one graph."""
    by_operator = ours(q[:, :1], k[:, :1], v[:, :1])[:, 0]
    return torch.stack((by_operator, handout(q[:, 1], k[:, 1], v[:, 1])), 1)


@pytest.mark.slow
def test_gradients_with_inductor():
    check(fused, both, (33,), "autocast")


def test_the_function_itself_compiled():
    """``torch.compile(FlashAttentionTriton.apply)`` and the gradient of a sum; for one length, and
    for every length."""
    call = torch.compile(FlashAttentionTriton.apply, backend="aot_eager")
    for length in (33, 64):
        tensors, do = torch.randn(3, 3, length, 16), torch.ones(()).expand(3, length, 16)
        got = with_gradients(call, *tensors, do, True)
        want = with_gradients(FlashAttentionTriton.apply, *tensors, do, True)
        blocks.assert_close(got, want, 1e-6, f"length {length}")


def test_one_tensor_given_twice_to_a_function():
    blocks.check_given_twice(blocks.q_is_k, handout, 33, backend="aot_eager")


def test_scale_that_changes_or_follows_from_the_shape():
    def following(q, scale):
        return flash_attention(q, q * 1.1, q + 1, scale=scale or 1 / q.shape[-1] ** 0.5)

    call = torch.compile(following, backend="aot_eager", fullgraph=True)
    q = torch.randn(2, 20, 16)
    for scale in (None, 0.3, 0.6):
        torch.testing.assert_close(call(q, scale), following(q, scale))
    torch._dynamo.reset()
    call = torch.compile(following, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(call(q, None), following(q, None))


def test_what_the_kernels_do_not_run_is_refused_when_traced(monkeypatch):
    monkeypatch.setattr(launches, "forward", None)  # never reached
    call = torch.compile(lambda x: ours(x, x + 1, x + 2), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="bfloat16, float16, float32"):
        call(torch.zeros(1, 8, 16, dtype=torch.float64))
    with pytest.raises(Exception, match="head_dim 1 to 128"):
        call(torch.zeros(1, 8, 129))


@pytest.mark.parametrize("attention", [ours, tiled])
def test_no_second_derivative_compiled(attention):
    call = torch.compile(lambda x: attention(x, x + 1, x + 2), backend="aot_eager")
    x = torch.randn(1, 8, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="derivative|double backward"):
        (g,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        torch.autograd.grad(g.square().sum(), x)


def cases():
    """Inputs of the operators: views, permuted dense tensors, grouped heads, other ranks."""
    for layout in ("contiguous", "transposed", "sliced"):
        inputs = random_inputs((1, 4, 20, 16), (1, 2, 33, 16), torch.float16)
        yield layout, [laid_out(x, layout) for x in inputs]
    qkv = torch.randn(2, 20, 3, 2, 16).permute(2, 0, 3, 1, 4).half()
    yield "fused", [*qkv.unbind(0), torch.randn(2, 2, 20, 16).half()]
    for shape in ((20, 16), (3, 20, 16), (2, 2, 2, 20, 16)):
        yield f"rank {len(shape)}", random_inputs(shape, shape, torch.float16)


CASES = dict(cases())
WANTED = {"all": [True, True, True], "q": [True, False, False], "v": [False, False, True]}


def operator_arguments(case):
    q, k, v, do = CASES[case]
    o, lse = torch.ops.a2lib.flash_forward(q, k, v, True, None)
    return (q, k, v, True, None), (do, q, k, v, o, lse, True, None)


@pytest.mark.parametrize(
    "case, wanted", [*((case, "all") for case in CASES), ("fused", "q"), ("fused", "v")]
)
def test_operators_say_the_strides_they_have(case, wanted):
    """opcheck of torch 2.11 does not look at strides."""
    forward, backward = operator_arguments(case)
    backward = *backward, WANTED[wanted]
    for operator, arguments in (
        (torch.ops.a2lib.flash_forward.default, forward),
        (torch.ops.a2lib.flash_backward.default, backward),
    ):
        with FakeTensorMode() as mode:
            said = operator(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        for real, fake in zip(operator(*arguments), said, strict=True):
            assert (real.shape, real.dtype) == (fake.shape, fake.dtype)
            assert real.stride() == fake.stride()
        assert torch.Tag.needs_exact_strides in operator.tags


def test_opcheck():
    forward, backward = operator_arguments("transposed")
    q, k, v, *rest = forward
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.a2lib.flash_forward.default, (*leaves, *rest))
    torch.library.opcheck(torch.ops.a2lib.flash_backward.default, (*backward, WANTED["all"]))


def test_operators_called_by_hand():
    q, k, v, do = CASES["fused"]
    q = q.detach().requires_grad_()
    o, lse = torch.ops.a2lib.flash_forward(q, k, v, True, None)
    assert o.requires_grad and not lse.requires_grad
    (dq,) = torch.autograd.grad(o, q, do, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_reference"):
        dq.sum().backward()
    for scale in (-1.0, 0.0):
        with pytest.raises(ValueError, match="number above 0"):
            torch.ops.a2lib.flash_forward(q, k, v, True, scale)


@pytest.mark.parametrize("keep", [False, True], ids=["plain", "selective"])
def test_checkpoint_compiled(monkeypatch, keep):
    """A policy that keeps the operator's results spares its second forward pass."""
    for name in ("forward", "backward"):
        monkeypatch.setattr(launches, name, Mock(wraps=getattr(launches, name)))
    block, truth = blocks.pair(fused, ours, torch.float32)
    kept = {torch.ops.a2lib.flash_forward.default}

    def policy(ctx, operator, *args, **kwargs):
        choice = checkpoints.CheckpointPolicy
        return choice.MUST_SAVE if operator in kept else choice.PREFER_RECOMPUTE

    def run(x):
        return checkpoints.checkpoint(block, x, use_reentrant=False, **options)

    contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, policy)
    options = {"context_fn": contexts} if keep else {}
    call = torch.compile(run, backend="aot_eager")
    x, dy = inputs(block, 33)
    got = blocks.by_name(call, block, x, dy)
    assert (launches.forward.call_count, launches.backward.call_count) == (1 if keep else 2, 1)
    blocks.assert_close(got, blocks.by_name(truth, truth, x, dy), 1e-5, "checkpoint")

"""Who looks at a call sees the operator, and what cannot be right is refused in one clear line."""

import attention_watchers as watchers
import pytest
import torch
from attention_watchers import ATTENTIONS, BACKWARD, FORWARD, both, forward, inputs, ours
from refusals import refused
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from a2lib.attention import UnsupportedError, attention_reference, flash_attention, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")
each = pytest.mark.parametrize("attention", ATTENTIONS)


@each
def test_a_mode_sees_both_passes(attention):
    qkv = inputs("cpu")
    with watchers.Operators() as mode:
        got = both(attention)(*qkv)
    assert [x for x in mode.seen if x in (FORWARD, BACKWARD)] == [FORWARD, BACKWARD]
    watchers.assert_same(got, both(attention)(*qkv))
    with watchers.Functions() as functions:
        forward(attention)(*qkv)
    assert FORWARD in functions.seen


def test_nobody_looks_on_at_a_plain_call(monkeypatch):
    monkeypatch.setattr(watchers.torch.ops.a2lib, "flash_forward", None)
    monkeypatch.setattr(watchers.torch.ops.a2lib, "flash_backward", None)
    for attention in ATTENTIONS:
        both(attention)(*inputs("cpu"))
        forward(attention)(*inputs("cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@each
def test_fake_tensors_reach_no_kernel_and_no_device(monkeypatch, attention, device):
    monkeypatch.setattr(launches, "forward", None)
    with FakeTensorMode():
        o = attention(*(torch.empty(2, 4, 40, 16, device=device) for _ in range(3)))
    assert isinstance(o, FakeTensor) and o.device.type == device
    assert o.stride() == (2560, 16, 64, 1)


@each
@pytest.mark.parametrize("tracer", watchers.OF_BOTH_PASSES.values(), ids=watchers.OF_BOTH_PASSES)
def test_graphs_of_both_passes(tracer, attention):
    watchers.check_traced(tracer, both(attention), "cpu", [FORWARD, BACKWARD])


@pytest.mark.parametrize("tracer", watchers.OF_THE_FORWARD.values(), ids=watchers.OF_THE_FORWARD)
def test_graphs_of_the_forward(tracer):
    watchers.check_traced(tracer, forward(ours), "cpu", [FORWARD])


@each
def test_flops_are_counted_as_pytorch_counts_its_own(attention):
    q, k, v = (x.requires_grad_() for x in inputs("cpu"))
    matmul = 2 * 2 * 4 * 40 * 40 * 16
    with FlopCounterMode(display=False) as counter:
        o = attention(q, k, v)
        assert counter.get_total_flops() == 2 * matmul
        o.float().sum().backward()
        assert counter.get_total_flops() == 7 * matmul
    o = attention(q, k, v)
    with FlopCounterMode(display=False) as counter:  # which comes after the forward
        o.float().sum().backward()
    assert counter.get_total_flops() == 5 * matmul
    with FlopCounterMode(display=False) as counter:  # of grouped keys: one matmul a query head
        attention(q.detach(), k[:, :1].detach(), v[:, :1].detach())
    assert counter.get_total_flops() == 2 * matmul


@each
def test_subclasses(attention):
    qkv = inputs("cpu")
    (want,) = forward(attention)(*qkv)
    got = attention(*(x.as_subclass(watchers.Marked) for x in qkv))
    assert type(got) is watchers.Marked and torch.equal(got.as_subclass(torch.Tensor), want)
    closed = [watchers.Closed(x) for x in qkv]
    refused("which Closed does not know", attention, *closed, error=UnsupportedError)
    refused("does not know", attention, qkv[0], closed[1], qkv[2], error=UnsupportedError)


def test_vmap_and_functionalize_are_right():
    q, k, v = inputs("cpu")
    want = ours(q, k, v)
    for dims in ((0, 0, 0), (1, 1, 1)):
        got = torch.func.vmap(ours, dims, dims[0])(q, k, v)
        torch.testing.assert_close(got, want)
    got = torch.func.vmap(ours, (0, None, None))(q, k[0], v[0])
    torch.testing.assert_close(got, ours(q, k[:1].expand_as(q), v[:1].expand_as(q)))
    torch.testing.assert_close(torch.func.functionalize(ours)(q, k, v), want)


@pytest.mark.parametrize("transform, words", [
    (torch.func.grad, "no gradient within torch.func"),
    (torch.func.jacrev, "no gradient within torch.func"),
    (torch.func.hessian, "no (gradient|derivative)"),
    (torch.func.jacfwd, "no derivative in forward mode"),
    (lambda f: lambda q: torch.func.jvp(f, (q,), (q,)), "no derivative in forward mode"),
    (lambda f: lambda q: torch.func.vmap(torch.func.grad(f))(q[None]), "no gradient"),
])  # fmt: skip
def test_derivatives_of_torch_func_are_refused(transform, words):
    q, k, v = (x[0] for x in inputs("cpu"))

    def loss(q):
        return flash_attention(q, k, v).float().sum()

    refused(words, transform(loss), q, error=UnsupportedError)


def test_dtensors():
    watchers.check_dtensors("cpu")


@pytest.mark.parametrize("shape", [(40, 16), (3, 40, 16), (2, 3, 40, 16), (2, 1, 3, 40, 16)])
@pytest.mark.parametrize(
    "attention", [*ATTENTIONS, lambda q, k, v: FORWARD(q, k, v, True, None)[0]]
)
def test_in_place(attention, shape):
    watchers.check_in_place(attention, shape, "cpu")


def test_memory_with_another_sign_or_none():
    q, k, v = inputs("cpu", 3)
    turned = torch.complex(q.float(), q.float()).conj().imag
    assert turned.is_neg()
    k, v = k.float(), v.float()
    torch.testing.assert_close(ours(turned, k, v), ours(-q.float(), k, v))
    sparse = q.float().to_sparse()
    refused("runs dense tensors; got torch.sparse_coo", ours, sparse, k, v, error=UnsupportedError)


def test_a_profiler_changes_nothing():
    qkv = inputs("cpu")
    want = both(ours)(*qkv)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True):
        got = both(ours)(*qkv)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_a_call_is_right_again_after_it_was_traced():
    qkv = inputs("cpu")
    for tracer in watchers.OF_BOTH_PASSES.values():
        tracer(both(ours), qkv)
        o, *_ = both(ours)(*qkv)
        want = attention_reference(*(x.double() for x in qkv), True)
        torch.testing.assert_close(o.double(), want, rtol=1e-2, atol=1e-2)

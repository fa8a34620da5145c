"""Who looks at a call sees the operator, and what cannot be right is refused in one clear line.

On a GPU where there is one, and else in Triton's interpreter.
"""

import functools

import pytest
import torch
from refusals import refused
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from a2lib.attention import (
    FlashAttentionTriton,
    UnsupportedError,
    attention_reference,
    flash_attention,
    launches,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []

FORWARD = torch.ops.a2lib.flash_forward.default
BACKWARD = torch.ops.a2lib.flash_backward.default


def ours(q, k, v):
    return flash_attention(q, k, v, is_causal=True)


def handout(q, k, v):
    return FlashAttentionTriton.apply(q, k, v, True)


each = pytest.mark.parametrize("attention", [ours, handout])


@pytest.fixture(autouse=True)
def the_context_is_whole():
    """An illegal access shows at the next synchronisation, in another test."""
    yield
    if ON_GPU:
        torch.cuda.synchronize()


def inputs():
    """q, k and v as a model's projections lie."""
    x = torch.randn(3, 2, 40, 4, 16, device=DEVICE).half()
    return x.transpose(2, 3).unbind(0)


def forward(attention):
    return lambda q, k, v: (attention(q.detach(), k.detach(), v.detach()),)


def both(attention):
    def passes(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = attention(*leaves)
        return o, *torch.autograd.grad(o.float().square().sum(), leaves)

    return passes


def assert_same(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


class Operators(TorchDispatchMode):
    """Keeps which of ours were called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in (FORWARD, BACKWARD):
            self.seen.append(operator)
        return operator(*args, **(kwargs or {}))


@each
def test_a_mode_sees_the_operators(attention):
    qkv = inputs()
    with Operators() as mode:
        got = both(attention)(*qkv)
    assert mode.seen == [FORWARD, BACKWARD]
    assert_same(got, both(attention)(*qkv))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@each
def test_fake_tensors_reach_no_kernel_and_no_device(monkeypatch, attention, device):
    monkeypatch.setattr(launches, "forward", None)
    monkeypatch.setattr(launches, "backward", None)
    with FakeTensorMode():
        shape = {"size": (2, 4, 40, 16), "dtype": torch.half, "device": device}
        qkv = [torch.empty(**shape) for _ in range(3)]
        # PyTorch differentiates nothing on a device that is not there.
        results = both(attention)(*qkv) if device == DEVICE else [attention(*qkv)]
    for x in results:
        assert isinstance(x, FakeTensor) and x.device.type == device
    assert results[0].stride() == (2560, 16, 64, 1)


# Tracers: each returns the operators of ours in a graph, and the graph as a function.


def ours_in(graph):
    return [node.target for node in graph.nodes if node.target in (FORWARD, BACKWARD)]


def by_make_fx(call, qkv, **options):
    graph = make_fx(call, **options)(*qkv)
    return ours_in(graph.graph), graph


def by_export(call, qkv, strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return call(q, k, v)

    program = torch.export.export(Module(), tuple(qkv), strict=strict)
    return ours_in(program.graph), program.module()


def by_compile(call, qkv, **options):
    seen = []

    def backend(graph, example):
        seen.extend(ours_in(graph.graph))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True, **options)
    compiled(*qkv)
    return seen, compiled


def check_traced(tracer, call, wanted):
    """The graph has the operators and is right for tensors that it was not made with, and so is a
    call after it."""
    operators, graph = tracer(call, inputs())
    assert operators == wanted
    q, k, v = inputs()
    after = call(q, k, v)
    assert_same(graph(q, k, v), after)
    want = attention_reference(q.double(), k.double(), v.double(), True)
    assert_same([after[0].double()], [want])


@each
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_graphs_of_both_passes(mode, attention):
    tracer = functools.partial(by_make_fx, tracing_mode=mode)
    check_traced(tracer, both(attention), [FORWARD, BACKWARD])


OF_THE_FORWARD = {
    "export": functools.partial(by_export, strict=False),
    "export, strict": functools.partial(by_export, strict=True),
    "compile": by_compile,
    "compile, dynamic": functools.partial(by_compile, dynamic=True),
}


@pytest.mark.parametrize("tracer", OF_THE_FORWARD.values(), ids=OF_THE_FORWARD)
def test_graphs_of_the_forward(tracer):
    check_traced(tracer, forward(ours), [FORWARD])


@each
def test_flops_are_counted_as_pytorch_counts_its_own(attention):
    q, k, v = (x.requires_grad_() for x in inputs())
    matmul = 2 * 2 * 4 * 40 * 40 * 16
    with FlopCounterMode(display=False) as counter:
        o = attention(q, k, v)
        assert counter.get_total_flops() == 2 * matmul
    with FlopCounterMode(display=False) as counter:  # which comes after the forward
        o.float().sum().backward()
    assert counter.get_total_flops() == 5 * matmul
    with FlopCounterMode(display=False) as counter:  # of grouped keys: one matmul a query head
        attention(q.detach(), k[:, :1].detach(), v[:, :1].detach())
    assert counter.get_total_flops() == 2 * matmul


def test_vmap_and_functionalize_are_right():
    q, k, v = inputs()
    want = ours(q, k, v)
    for dims in ((0, 0, 0), (1, 1, 1)):
        assert_same([torch.func.vmap(ours, dims, dims[0])(q, k, v)], [want])
    got = torch.func.vmap(ours, (0, None, None))(q, k[0], v[0])
    assert_same([got], [ours(q, k[:1].expand_as(q), v[:1].expand_as(q))])
    assert_same([torch.func.functionalize(ours)(q, k, v)], [want])


@pytest.mark.parametrize("transform, words", [
    (torch.func.grad, "no gradient within torch.func"),
    (torch.func.jacfwd, "no derivative in forward mode"),
    (lambda f: lambda q: torch.func.vmap(torch.func.grad(f))(q[None]), "no gradient"),
])  # fmt: skip
def test_derivatives_of_torch_func_are_refused(transform, words):
    q, k, v = (x[0] for x in inputs())

    def loss(q):
        return flash_attention(q, k, v).float().sum()

    refused(words, transform(loss), q, error=UnsupportedError)


@pytest.mark.parametrize("shape", [(40, 16), (2, 3, 40, 16)])
@each
def test_in_place(attention, shape):
    """Right where nothing is differentiated, refused in PyTorch's one line where it is."""
    q, k, v = torch.randn(3, *shape, device=DEVICE).half().unbind(0)
    with torch.no_grad():
        want = attention_reference(q, k, v, True) + 1
        o = attention(q, k, v)
        o += 1
        assert_same([o], [want])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves)
    assert not o._is_view(), "of which autograd says much, and nothing clear"
    o += q
    refused("modified by an inplace operation", o.sum().backward, error=RuntimeError)
    o = attention(*leaves) + 0
    o += q
    o.sum().backward()
    assert leaves[0].grad is not None


@pytest.mark.gpu
def test_a_profiler_sees_the_kernels():
    qkv = inputs()
    both(ours)(*qkv)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        both(ours)(*qkv)
        torch.cuda.synchronize()
    names = {event.key for event in profiler.key_averages()}
    assert {"forward_kernel", "backward_kernel"} <= names

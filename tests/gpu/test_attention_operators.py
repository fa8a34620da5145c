"""Who looks at a call on a GPU sees the operator, and no kernel is given what has no memory."""

import attention_watchers as watchers
import pytest
import torch
from attention_watchers import ATTENTIONS, BACKWARD, FORWARD, both, forward, inputs, ours
from refusals import refused
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from a2lib.attention import UnsupportedError, launches

pytestmark = pytest.mark.gpu
each = pytest.mark.parametrize("attention", ATTENTIONS)


@pytest.fixture(autouse=True)
def the_context_is_whole():
    """An illegal access shows at the next synchronisation, in another test."""
    yield
    torch.cuda.synchronize()


@each
def test_modes(attention):
    qkv = inputs("cuda")
    for mode in (watchers.Operators(), watchers.Functions()):
        with mode:
            got = both(attention)(*qkv)
        assert FORWARD in mode.seen
        watchers.assert_same(got, both(attention)(*qkv))


@each
def test_fake_tensors(monkeypatch, attention):
    monkeypatch.setattr(launches, "forward", None)
    monkeypatch.setattr(launches, "backward", None)
    with FakeTensorMode():
        qkv = [torch.empty(2, 4, 40, 16, device="cuda", dtype=torch.half) for _ in range(3)]
        results = both(attention)(*qkv)
    assert all(isinstance(x, FakeTensor) and x.device.type == "cuda" for x in results)


@each
@pytest.mark.parametrize("tracer", watchers.OF_BOTH_PASSES.values(), ids=watchers.OF_BOTH_PASSES)
def test_graphs_of_both_passes(tracer, attention):
    watchers.check_traced(tracer, both(attention), "cuda", [FORWARD, BACKWARD])


@pytest.mark.parametrize("tracer", watchers.OF_THE_FORWARD.values(), ids=watchers.OF_THE_FORWARD)
def test_graphs_of_the_forward(tracer):
    watchers.check_traced(tracer, forward(ours), "cuda", [FORWARD])


@each
def test_flops(attention):
    q, k, v = (x.requires_grad_() for x in inputs("cuda"))
    matmul = 2 * 2 * 4 * 40 * 40 * 16
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v).float().sum().backward()
    assert counter.get_total_flops() == 7 * matmul
    o = attention(q, k, v)
    with FlopCounterMode(display=False) as counter:  # autograd's thread for GPUs has it too
        o.float().sum().backward()
    assert counter.get_total_flops() == 5 * matmul


@each
def test_subclasses(attention):
    qkv = inputs("cuda")
    got = attention(*(x.as_subclass(watchers.Marked) for x in qkv))
    assert type(got) is watchers.Marked
    watchers.assert_same([got.as_subclass(torch.Tensor)], forward(attention)(*qkv))
    closed = [watchers.Closed(x) for x in qkv]
    refused("which Closed does not know", attention, *closed, error=UnsupportedError)


def test_transforms():
    q, k, v = inputs("cuda")
    watchers.assert_same([torch.func.vmap(ours)(q, k, v)], [ours(q, k, v)])
    watchers.assert_same([torch.func.functionalize(ours)(q, k, v)], [ours(q, k, v)])

    def loss(q):
        return ours(q, k, v).float().sum()

    refused("no gradient within", torch.func.grad(loss), q, error=UnsupportedError)
    refused("forward mode", torch.func.jvp, loss, (q,), (q,), error=UnsupportedError)


def test_dtensors():
    watchers.check_dtensors("cuda")


@pytest.mark.parametrize("shape", [(40, 16), (2, 3, 40, 16)])
@each
def test_in_place(attention, shape):
    watchers.check_in_place(attention, shape, "cuda")


@pytest.mark.parametrize("call", [forward(ours), both(ours)], ids=["forward", "both"])
def test_captured_in_a_cuda_graph(call):
    """After calls that were kept, and as the first call of its shapes."""
    for warm in (3, 0):
        qkv = inputs("cuda") if warm else [x[:, :, :39].clone() for x in inputs("cuda")]
        launches._kept.clear()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(warm):
                call(*qkv)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if not warm:  # compiled, but for other addresses
            call(*(x.clone() for x in qkv))
        with torch.cuda.graph(graph):
            captured = call(*qkv)
        for x in qkv:
            x.copy_(torch.randn_like(x))
        graph.replay()
        watchers.assert_same(captured, call(*qkv))


def test_on_another_stream():
    qkv = inputs("cuda")
    want = both(ours)(*qkv)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        got = both(ours)(*qkv)
    torch.cuda.current_stream().wait_stream(stream)
    watchers.assert_same(got, want)


def test_a_profiler_sees_the_kernels_and_changes_nothing():
    qkv = inputs("cuda")
    want = both(ours)(*qkv)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            got = both(ours)(*qkv)
            torch.cuda.synchronize()
        watchers.assert_same(got, want)
    names = {event.key for event in profiler.key_averages()}
    assert {"forward_kernel", "backward_kernel"} <= names


def test_triton_is_asked_of_each_launch_where_somebody_wants_to_know():
    """By Triton's own hook, as its profiler sets it; also of launches that were kept."""
    from triton import knobs

    qkv = inputs("cuda")
    want, told = forward(ours)(*qkv), []
    before = knobs.runtime.launch_enter_hook
    hook = lambda metadata: told.append(metadata.get()["name"])  # noqa: E731
    if hasattr(before, "add"):
        before.add(hook)
    else:
        knobs.runtime.launch_enter_hook = hook
    try:
        got = forward(ours)(*qkv)
    finally:
        if hasattr(before, "remove"):
            before.remove(hook)
        else:
            knobs.runtime.launch_enter_hook = before
    watchers.assert_same(got, want)
    assert told == ["forward_kernel"]

"""Attention under torch.compile on a GPU: every gradient by name, against eager and float64."""

import pytest
import torch
from attention_blocks import (
    DISTINCT,
    FORMS,
    Block,
    assert_close,
    by_name,
    fused,
    gqa,
    handout,
    inputs,
    ours,
    pair,
    q_is_k,
    three_dimensions,
    tiled,
)
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from a2lib.attention import FlashAttentionTriton, attention_reference

pytestmark = pytest.mark.gpu

# Against float64 on the same weights and inputs, and against the same block in eager. A gradient
# with a wrong stride or a lost term is off by tens of percent.
TRUTH = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2, "autocast": 5e-2}
EAGER = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 1e-2, "autocast": 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (128, 192, 256, 63, 333, 2)


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


def check(form, attention, kind, lengths, *, heads=4, head_dim=64, repeats=1, **options):
    dtype, autocast = DTYPES.get(kind, torch.float32), kind == "autocast"
    block, truth = pair(form, attention, dtype, "cuda", heads=heads, head_dim=head_dim)
    call = torch.compile(block, fullgraph=True, **options)
    for length in lengths:
        x, dy = inputs(block, length)
        want = by_name(truth, truth, x, dy)
        eager = by_name(block, block, x, dy, autocast)
        for again in range(repeats):
            torch.compiler.cudagraph_mark_step_begin()
            cell = f"{form.__name__}, {attention.__name__}, {kind}, {length} tokens, run {again}"
            got = {name: y.clone() for name, y in by_name(call, block, x, dy, autocast).items()}
            assert_close(got, want, TRUTH[kind], f"{cell}, float64")
            assert_close(got, eager, EAGER[kind], f"{cell}, eager")


@pytest.mark.parametrize("kind", TRUTH)
@pytest.mark.parametrize("form", FORMS, ids=named)
def test_lengths_that_change_from_call_to_call(form, kind):
    check(form, ours, kind, LENGTHS)


@pytest.mark.parametrize("kind", TRUTH)
@pytest.mark.parametrize("length", [128, 192, 256])
def test_one_length_static(length, kind):
    check(fused, ours, kind, (length,), dynamic=False)


@pytest.mark.parametrize("form", [fused, gqa, three_dimensions], ids=named)
@pytest.mark.parametrize("attention", [ours, handout])
def test_every_size_dynamic(form, attention):
    check(form, attention, "bf16", LENGTHS[:5], dynamic=True)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("form", DISTINCT, ids=named)
def test_the_function(form, kind):
    check(form, handout, kind, (128, 192, 63))


@pytest.mark.parametrize("head_dim", [16, 32, 80, 128])
def test_head_sizes(head_dim):
    check(fused, ours, "bf16", (192, 63), head_dim=head_dim)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("form", [fused, gqa], ids=named)
def test_cuda_graphs(form, kind):
    """mode="reduce-overhead": warm-up, capture, and the replays after them."""
    counters.clear()
    check(form, ours, kind, (128, 256, 128), repeats=4, dynamic=False, mode="reduce-overhead")
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_the_same_bits_every_run():
    block, _ = pair(fused, ours, torch.bfloat16, "cuda", head_dim=64)
    call = torch.compile(block, fullgraph=True)
    x, dy = inputs(block, 333)
    first = by_name(call, block, x, dy)
    for _ in range(20):
        for name, got in by_name(call, block, x, dy).items():
            assert torch.equal(got, first[name]), name


@pytest.mark.parametrize("kind, tolerance", [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 1e-2)])
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_the_function_itself_compiled(dynamic, kind, tolerance):
    """As the public board times it: 3-D leaves, the gradient of a sum, one compiled ``apply``."""
    call = torch.compile(FlashAttentionTriton.apply, dynamic=dynamic)
    for length in (256, 512, 333):
        torch.manual_seed(0)
        leaves = torch.randn(3, 16, length, 64, device="cuda", dtype=DTYPES[kind])
        q, k, v = (x.clone().requires_grad_() for x in leaves)
        o = call(q, k, v, True)
        o.sum().backward()
        got = {"o": o.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        q, k, v = (x.double().requires_grad_() for x in leaves)
        o = attention_reference(q, k, v, True)
        o.sum().backward()
        want = {"o": o.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        cell = f"apply, {kind}, {length} tokens, dynamic={dynamic}"
        assert_close(got, want, tolerance, cell)


def test_one_tensor_given_twice_to_the_function():
    block, truth = pair(q_is_k, handout, torch.float32, "cuda", head_dim=64)
    x, dy = inputs(block, 192)
    with pytest.raises(Exception, match="three different tensors|UnsupportedError|duplicate"):
        torch.compile(block, fullgraph=True)(x)
    torch._dynamo.reset()
    got = by_name(torch.compile(block), block, x, dy)
    assert_close(got, by_name(truth, truth, x, dy), 1e-5, "graph breaks, float64")


def test_tf32_is_read_inside(monkeypatch):
    """The setting of the time of the call counts, not that of the time of tracing."""
    q, k, v = torch.randn(3, 2, 256, 64, device="cuda").unbind(0)
    call = torch.compile(lambda q, k, v: ours(q, k, v), fullgraph=True)
    want = attention_reference(q.double(), k.double(), v.double(), True)

    def error():
        return ((call(q, k, v).double() - want).norm() / want.norm()).item()

    exact = error()
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert 10 * exact < error() < 5e-3


def test_checkpoint_compiled():
    block, truth = pair(fused, ours, torch.float32, "cuda", head_dim=64)
    call = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False))
    x, dy = inputs(block, 192)
    assert_close(by_name(call, block, x, dy), by_name(truth, truth, x, dy), 1e-5, "checkpoint")


class Model(nn.Module):
    """Two blocks with norms between, as they are trained."""

    def __init__(self, attention):
        super().__init__()
        self.first, self.second = (Block(fused, attention, 4, 64) for _ in range(2))
        self.norm = nn.RMSNorm(256)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def test_ten_steps_of_training():
    """Losses and parameters of a compiled model stay those of eager, to float32's rounding."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(ours).cuda())
    calls = torch.compile(models[0], fullgraph=True), models[1]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in models]
    for step in range(10):
        torch.manual_seed(step)
        x, y = torch.randn(2, 2, 128 + 32 * (step % 3), 256, device="cuda")
        losses = []
        for call, optimizer in zip(calls, optimizers, strict=True):
            loss = (call(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0, msg=f"step {step}: {losses}")
    compiled, eager = (dict(m.named_parameters()) for m in models)
    for name, want in eager.items():
        torch.testing.assert_close(compiled[name], want, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(compiled[name].grad, want.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_the_tiled_function():
    """Nothing of it is opaque: Dynamo traces its passes line by line."""
    check(fused, tiled, "fp32", (96,), head_dim=16)

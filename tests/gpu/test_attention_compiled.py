"""Attention under torch.compile on a GPU: every gradient by name, against eager and float64."""

import attention_blocks as blocks
import pytest
import torch
from attention_blocks import by_name, fresh, fused, gqa, handout, inputs, named, ours  # noqa: F401
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from a2lib.attention import FlashAttentionTriton, attention_reference, dispatch, launches

pytestmark = pytest.mark.gpu

EAGER = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 1e-2, "autocast": 2e-2}
LENGTHS = (128, 192, 63, 333, 2)


def check(form, attention, kind, lengths, *, heads=4, head_dim=64, **options):
    sizes = {"heads": heads, "head_dim": head_dim}
    blocks.check(form, attention, kind, lengths, EAGER, device="cuda", sizes=sizes, **options)


# How q, k and v lie is the form's, whatever their dtype: each form in float32, whose bounds are
# tight, and another dtype where a form computes or casts in it.
COMPUTING = fused, gqa, blocks.rope, blocks.rms_norm
CELLS = [
    *((form, "fp32") for form in blocks.FORMS),
    *((form, kind) for form in COMPUTING for kind in ("bf16", "autocast")),
    (fused, "fp16"),
]


@pytest.mark.parametrize("form, kind", CELLS, ids=named)
def test_lengths_that_change_from_call_to_call(form, kind):
    """The first call is compiled for its length, the second for any, the others find that."""
    check(form, ours, kind, LENGTHS)


@pytest.mark.parametrize(
    "form, attention", [(fused, ours), (gqa, ours), (blocks.three_dimensions, handout)], ids=named
)
def test_every_size_dynamic(form, attention):
    check(form, attention, "bf16", LENGTHS, dynamic=True)


@pytest.mark.parametrize(
    "form, kind",
    [*((form, "fp32") for form in blocks.DISTINCT), (fused, "bf16"), (fused, "autocast")],
    ids=named,
)
def test_the_function(form, kind):
    check(form, handout, kind, (128, 192, 63))


@pytest.mark.parametrize("head_dim", [16, 32, 80, 128])
def test_head_sizes(head_dim):
    check(fused, ours, "bf16", (192, 63), head_dim=head_dim)


@pytest.mark.parametrize("form, kind", [(fused, "fp32"), (fused, "bf16"), (gqa, "bf16")], ids=named)
def test_cuda_graphs(form, kind):
    """mode="reduce-overhead", each length compiled: warm-up, capture, and the replays after."""
    counters.clear()
    check(form, ours, kind, (128, 256, 128), repeats=4, dynamic=False, mode="reduce-overhead")
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_the_same_bits_every_run(monkeypatch):
    monkeypatch.setattr(
        dispatch, "in_chunks", lambda *_: False
    )  # its additions have no fixed order
    monkeypatch.setattr(launches, "_kept", {})
    block, _ = blocks.pair(fused, ours, torch.bfloat16, "cuda", head_dim=64)
    call = torch.compile(block, fullgraph=True)
    x, dy = inputs(block, 333)
    first = by_name(call, block, x, dy)
    for _ in range(20):
        for name, got in by_name(call, block, x, dy).items():
            assert torch.equal(got, first[name]), name


@pytest.mark.parametrize(
    "dynamic, kind",
    [(None, "fp32"), (None, "fp16"), (None, "bf16"), (False, "bf16"), (True, "bf16")],
)
def test_the_function_itself_compiled(dynamic, kind):
    """As the public board times it: 3-D leaves, the gradient of a sum, one compiled ``apply``."""
    call = torch.compile(FlashAttentionTriton.apply, dynamic=dynamic)
    for length in (256, 512, 333):
        torch.manual_seed(0)
        tensors = torch.randn(3, 16, length, 64, device="cuda", dtype=blocks.KINDS[kind][0])
        got = blocks.of_sum(call, tensors)
        want = blocks.of_sum(attention_reference, tensors.double())
        cell = f"apply, {kind}, {length} tokens, dynamic={dynamic}"
        blocks.assert_close(got, want, EAGER[kind], cell)


def test_one_tensor_given_twice_to_the_function():
    blocks.check_given_twice(blocks.q_is_k, handout, 192, "cuda")


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
    block, truth = blocks.pair(fused, ours, torch.float32, "cuda", head_dim=64)
    call = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False))
    x, dy = inputs(block, 192)
    blocks.assert_close(
        by_name(call, block, x, dy), by_name(truth, truth, x, dy), 1e-5, "checkpoint"
    )


class Model(nn.Module):
    """Two blocks with norms between, as they are trained."""

    def __init__(self, attention):
        super().__init__()
        self.first, self.second = (blocks.Block(fused, attention, 4, 64) for _ in range(2))
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
    check(fused, blocks.tiled, "fp32", (96,), head_dim=16)

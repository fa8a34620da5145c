"""Attention under torch.compile on a GPU: every gradient by name, against eager and float64."""

import attention_blocks as blocks
import pytest
import torch
from attention_blocks import fresh, fused, gqa, handout, named, ours  # noqa: F401
from attention_compare import in_float64, with_gradients
from torch._dynamo.utils import counters

from a2lib.attention import FlashAttentionTriton

pytestmark = pytest.mark.gpu

EAGER = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 1e-2, "autocast": 2e-2}
LENGTHS = (128, 192, 63, 333, 2)


def check(form, attention, kind, lengths, *, heads=4, head_dim=64, **options):
    sizes = {"heads": heads, "head_dim": head_dim}
    blocks.check(form, attention, kind, lengths, EAGER, device="cuda", sizes=sizes, **options)


# How q, k and v lie is the form's, whatever their dtype: each form in float32, whose bounds are
# tight, and another dtype where a form computes or casts in it.
COMPUTING = fused, gqa, blocks.rope, blocks.rms_norm
CELLS = [(fused, "fp16")]
for form in blocks.FORMS:
    CELLS.append((form, "fp32"))
    if form in COMPUTING:
        CELLS += [(form, "bf16"), (form, "autocast")]


@pytest.mark.parametrize("form, kind", CELLS, ids=named)
def test_lengths_that_change_from_call_to_call(form, kind):
    """The first call is compiled for its length, the second for any, the others find that."""
    check(form, ours, kind, LENGTHS)


@pytest.mark.parametrize(
    "form, attention", [(fused, ours), (gqa, ours), (blocks.three_dimensions, handout)], ids=named
)
def test_every_size_dynamic(form, attention):
    check(form, attention, "bf16", LENGTHS, dynamic=True)


@pytest.mark.parametrize("form", blocks.DISTINCT, ids=named)
def test_the_function(form):
    check(form, handout, "fp32", (128, 192, 63))


@pytest.mark.parametrize("kind", ["bf16", "autocast"])
def test_the_function_in_16_bits(kind):
    check(fused, handout, kind, (128, 192, 63))


@pytest.mark.parametrize("head_dim", [16, 32, 80, 128])
def test_head_sizes(head_dim):
    check(fused, ours, "bf16", (192, 63), head_dim=head_dim)


@pytest.mark.parametrize("form, kind", [(fused, "fp32"), (fused, "bf16"), (gqa, "bf16")], ids=named)
def test_cuda_graphs(form, kind):
    """mode="reduce-overhead", each length compiled: warm-up, capture, and the replays after."""
    counters.clear()
    check(form, ours, kind, (128, 256, 128), repeats=4, dynamic=False, mode="reduce-overhead")
    assert counters["inductor"]["cudagraph_skips"] == 0


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
        do = tensors.new_ones(()).expand_as(tensors[0])
        got = with_gradients(call, *tensors, do, True)
        want = in_float64(*tensors, do, True)
        cell = f"apply, {kind}, {length} tokens, dynamic={dynamic}"
        blocks.assert_close(got, want, EAGER[kind], cell)

"""Bytes that one block keeps for backward: the formula, hooks and the graph, to the byte."""

import weakref

import pytest
import torch
from cuda_casts import as_cuda_casts
from notebook_cells import load_cells

from a2lib.model import RotaryPositionalEmbedding, TransformerBlock
from a2lib.shapes import Shape
from a2lib.theory.memory.saved import block_saved, block_saved_bytes

saved_for_backward = load_cells("memory").saved_for_backward
SHAPES = [(Shape(24, 40, 1, 2), 2, 12), (Shape(16, 24, 1, 4), 1, 20)]


def kept(shape, batch, context, attention, precision):
    rope = RotaryPositionalEmbedding(1e4, shape.head_dim, context)
    block = TransformerBlock(shape.d_model, shape.num_heads, shape.d_ff, rope, attention)
    if precision == "bf16" and attention == "eager":
        block.attn.attention = as_cuda_casts
    x = torch.randn(batch, context, shape.d_model, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        return saved_for_backward(block, x)[1]


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_tensor_of_the_block(sizes, attention, precision):
    # Triton's interpreter multiplies bfloat16 wrongly; what is kept has its size all the same.
    found = sorted(one["bytes"] for one in kept(*sizes, attention, precision))
    assert found == sorted(block_saved(*sizes, attention, precision).values())
    assert sum(found) == block_saved_bytes(*sizes, attention, precision)


def test_counting_frees_what_it_has_counted():
    """A result that its own operation keeps, as of a softmax, would keep the graph and itself."""
    storages = []

    class Softmax(torch.nn.Module):
        def forward(self, x):
            p = torch.softmax(x * 2, -1)
            storages.append(weakref.ref(p.untyped_storage()))
            return p * p

    output, found = saved_for_backward(Softmax(), torch.ones(5, requires_grad=True))
    output.sum().backward(retain_graph=True)
    assert storages[0]() is not None and len(found) == 1
    del output
    assert storages[0]() is None


def test_the_operations_that_keep_them():
    by_operation = {}
    for one in kept(*SHAPES[0], "eager", "fp32"):
        assert one["operations"]
        for name in one["operations"].split():
            by_operation.setdefault(name, []).append(one)
    [probabilities] = by_operation["SoftmaxBackward0.result"]
    assert probabilities["module"] == "attn"
    assert "BmmBackward0.self" in probabilities["operations"].split()
    norms = [one for one in by_operation["MmBackward0.self"] if one["module"] == "attn.q_proj"]
    assert norms[0]["operations"].split() == ["MmBackward0.self"] * 3


def test_a_plain_module_is_counted_and_left_without_hooks():
    model = torch.nn.Sequential(torch.nn.ReLU())
    _, [one] = saved_for_backward(model, torch.ones(3, requires_grad=True))
    found = (one["module"], one["bytes"], one["operations"])
    assert found == ("0", 12, "ReluBackward0.result")
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks

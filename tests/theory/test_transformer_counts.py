"""Closed forms of the Transformer against the model's tensors and a counter of operations."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch.utils.flop_counter import FlopCounterMode

from a2lib.model import TransformerLM, cross_entropy
from a2lib.shapes import PRESETS, PUBLISHED, SIZES, GroupedShape, Shape, named_size
from a2lib.theory import transformer
from a2lib.theory.transformer import parameter_count

# The handouts' models, counted once by hand.
LISTED = {
    "small": 128_625_408, "medium": 423_183_360, "large": 969_411_840, "xl25": 1_998_235_200,
    "2.7B": 3_406_809_600, "8B": 8_125_698_048, "10B": 12_832_823_808,
}  # fmt: skip
# Of the weights of Llama 3.1 that Meta released, as Hugging Face counts them (safetensors).
RELEASED = {
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3-405B": 405_853_388_800,
}


@st.composite
def shapes(draw):
    num_heads, pairs = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    d_ff, num_layers, vocab_size = (draw(st.integers(1, most)) for most in (9, 3, 11))
    return Shape(2 * pairs * num_heads, d_ff, num_layers, num_heads, vocab_size)


@pytest.mark.parametrize("name", SIZES)
def test_named_sizes_have_the_listed_parameters(name):
    shape = named_size(name)
    model = TransformerLM.from_size(name, 16, device="meta")
    assert model.shape == shape
    assert sum(p.numel() for p in model.parameters()) == parameter_count(shape) == LISTED[name]


@settings(max_examples=10)
@given(shapes(), st.integers(1, 3), st.integers(1, 6))
def test_operations_are_those_a_counter_sees(shape, batch, context):
    model = TransformerLM.from_size(shape, context, seed=0)
    tokens = torch.zeros(batch, context, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        cross_entropy(logits, tokens).backward()
    counted = forward.get_total_flops()
    assert counted == transformer.forward_flops(shape, batch, context)
    assert counted + backward.get_total_flops() == transformer.step_flops(shape, batch, context)
    by_module = forward.get_flop_counts()

    def flops_of(name):
        return sum(by_module[f"TransformerLM.{name}"].values())

    expected = {"projections": 0, "attention": 0, "ffn": 0, "lm_head": flops_of("lm_head")}
    for i in range(shape.num_layers):
        projections = 0
        for name in ("q", "k", "v", "output"):
            projections += flops_of(f"layers.{i}.attn.{name}_proj")
        expected["projections"] += projections
        expected["attention"] += flops_of(f"layers.{i}.attn") - projections
        expected["ffn"] += flops_of(f"layers.{i}.ffn")
    assert transformer.forward_flops_by_part(shape, batch, context) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_of_their_released_weights(name):
    shape = named_size(name, PRESETS)
    assert parameter_count(shape) == RELEASED[name]


def test_shapes_that_cannot_be_and_names_that_are_none():
    refused("d_model is 2.0; allowed are positive integers", Shape, 2.0, 8, 1, 2)
    refused("num_heads 3 does not divide d_model 8", Shape, 8, 8, 1, 3)
    refused("head_dim must be even", Shape, 9, 8, 1, 3)
    six = functools.partial(GroupedShape, 12, 8, 1, 6)
    refused("num_kv_heads 4 does not divide num_heads 6; it must", six, num_kv_heads=4)
    refused("allowed are small, medium, large, xl25, 2.7B, 8B, 10B", named_size, "huge")
    refused("'xl' is xl25 in the 2025 handout, 2.7B in that of 2026", named_size, "xl")

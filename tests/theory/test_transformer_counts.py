"""Closed forms of the Transformer against the model's tensors and a counter of operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from a2lib.model import TransformerLM, cross_entropy
from a2lib.theory.transformer import (
    SIZES,
    Shape,
    block_gradient_bytes,
    flops_per_token,
    forward_flops,
    forward_flops_by_part,
    named_size,
    parameter_count,
    parameters_by_part,
    residual_stream_bytes,
    state_bytes,
    step_flops,
)

# The handouts' models, counted once by hand.
LISTED = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl25": 1_998_235_200,
    "2.7B": 3_406_809_600,
    "8B": 8_125_698_048,
    "10B": 12_832_823_808,
}


def build(shape, context, **options):
    return TransformerLM(
        shape.vocab_size, context, shape.d_model, shape.num_layers, shape.num_heads, shape.d_ff,
        **options,
    )  # fmt: skip


@st.composite
def shapes(draw):
    num_heads, pairs = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Shape(
        d_model=2 * pairs * num_heads,
        d_ff=draw(st.integers(1, 9)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_heads,
        vocab_size=draw(st.integers(1, 11)),
    )


@pytest.mark.parametrize("name", SIZES)
def test_named_sizes_have_the_listed_parameters(name):
    shape = named_size(name)
    model = TransformerLM.from_size(name, 16, device="meta")
    assert model.shape == shape
    assert sum(p.numel() for p in model.parameters()) == parameter_count(shape) == LISTED[name]


def test_every_listed_size_has_a_name():
    assert SIZES.keys() == LISTED.keys()


@given(shapes())
def test_parameters_by_part_are_those_of_the_modules(shape):
    model = build(shape, 4, device="meta")
    found = dict.fromkeys(parameters_by_part(shape), 0)
    for name, parameter in model.named_parameters():
        part = next((p for p in ("attn", "ffn", "ln") if p in name), name.split(".")[0])
        found[{"attn": "attention", "ln": "norms"}.get(part, part)] += parameter.numel()
    assert found == parameters_by_part(shape)


@settings(max_examples=10)
@given(shapes(), st.integers(1, 3), st.integers(1, 6))
def test_operations_are_those_a_counter_sees(shape, batch, context):
    model = build(shape, context, seed=0)
    tokens = torch.zeros(batch, context, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        cross_entropy(logits, tokens).backward()
    counted = forward.get_total_flops()
    assert counted == forward_flops(shape, batch, context)
    assert counted + backward.get_total_flops() == step_flops(shape, batch, context)
    assert counted == flops_per_token(shape, context) * batch * context
    by_module = {name: sum(c.values()) for name, c in forward.get_flop_counts().items()}
    parts = forward_flops_by_part(shape, batch, context)
    layers = range(shape.num_layers)
    ffn = sum(by_module[f"TransformerLM.layers.{i}.ffn"] for i in layers)
    projections = sum(
        by_module[f"TransformerLM.layers.{i}.attn.{name}_proj"]
        for i in layers
        for name in ("q", "k", "v", "output")
    )
    attn = sum(by_module[f"TransformerLM.layers.{i}.attn"] for i in layers)
    assert parts["ffn"] == ffn
    assert parts["projections"] == projections
    assert parts["attention"] == attn - projections
    assert parts["lm_head"] == by_module["TransformerLM.lm_head"]


@given(shapes(), st.integers(1, 3), st.integers(1, 9))
def test_a_causal_count_halves_attention_and_nothing_else(shape, batch, context):
    full = forward_flops_by_part(shape, batch, context)
    half = forward_flops_by_part(shape, batch, context, causal=True)
    assert 2 * half.pop("attention") == full.pop("attention")
    assert half == full
    causal = flops_per_token(shape, context, causal=True) * batch * context
    assert causal == forward_flops(shape, batch, context, causal=True)
    assert 3 * causal == step_flops(shape, batch, context, causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_tensors_of_a_step(dtype):
    shape = Shape(d_model=12, d_ff=20, num_layers=2, num_heads=3, vocab_size=17)
    model = build(shape, 5, dtype=dtype, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    residual = []
    model.layers[0].register_forward_hook(lambda *call: residual.append(call[-1].nbytes))
    cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
    size = dtype.itemsize
    want = state_bytes(shape, size)
    states = optimizer.state.values()
    assert sum(p.nbytes for p in model.parameters()) == want.parameters
    assert sum(p.grad.nbytes for p in model.parameters()) == want.gradients
    moments = sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in states)
    assert moments == want.optimizer
    assert all(set(s) == {"step", "exp_avg", "exp_avg_sq"} for s in states)
    assert all(s["step"].nbytes == 4 for s in states)
    assert want.total == want.parameters + want.gradients + want.optimizer
    block = sum(p.grad.nbytes for p in model.layers[1].parameters())
    assert block == block_gradient_bytes(shape, size)
    assert residual == [residual_stream_bytes(shape, 2, 5, size)]


def test_moments_may_be_wider_than_the_weights():
    shape = SIZES["small"]
    n = parameter_count(shape)
    mixed = state_bytes(shape, 2, moment_bytes=4)
    assert (mixed.parameters, mixed.gradients, mixed.optimizer) == (2 * n, 2 * n, 8 * n)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "8", None])
@pytest.mark.parametrize("name", ["d_model", "d_ff", "num_layers", "num_heads", "vocab_size"])
def test_sizes_must_be_positive_integers(name, wrong):
    good = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 8}
    with pytest.raises(ValueError, match=f"{name} is .*; allowed are positive integers"):
        Shape(**{**good, name: wrong})
    shape = Shape(**good)
    for call in (
        lambda: forward_flops(shape, wrong, 4),
        lambda: forward_flops(shape, 4, wrong),
        lambda: residual_stream_bytes(shape, 1, wrong),
        lambda: residual_stream_bytes(shape, 1, 1, wrong),
        lambda: block_gradient_bytes(shape, wrong),
        lambda: state_bytes(shape, wrong),
    ):
        with pytest.raises(ValueError, match="allowed are positive integers"):
            call()


def test_heads_that_do_not_fit_and_names_that_are_none():
    with pytest.raises(ValueError, match="num_heads 3 does not divide d_model 8"):
        Shape(8, 8, 1, 3)
    with pytest.raises(ValueError, match="head_dim must be even"):
        Shape(9, 8, 1, 3)
    with pytest.raises(ValueError, match="allowed are small, medium, large, xl25, 2.7B, 8B, 10B"):
        named_size("huge")
    with pytest.raises(ValueError, match="'xl' is xl25 in the 2025 handout, 2.7B in that of 2026"):
        named_size("xl")

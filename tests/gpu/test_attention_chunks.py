"""Plain Triton's backward in chunks of queries and in one launch on a real GPU, at lengths on and
beside the edges of tiles."""

import random

import pytest
import torch
from attention_compare import keys_for, near_float64, poison, random_inputs, random_problem

from a2lib.attention import FlashAttentionTriton, passes, plans

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 1e-5}
ours = FlashAttentionTriton.apply


@pytest.fixture(params=["chunks", "one launch"])
def form(request, monkeypatch):
    """Every backward is of one form, where there is a kernel."""
    monkeypatch.setattr(passes, "in_chunks", lambda *_: request.param == "chunks")
    monkeypatch.setattr(passes, "in_two_terms", lambda _, __, d, size: d > 64 and size == 4)
    monkeypatch.setattr(passes, "in_one_launch", lambda *_: request.param == "one launch")
    monkeypatch.setattr(plans, "_plans", {})
    return request.param


@pytest.mark.parametrize("length", [1, 65, 128, 200, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [72, 128])
def test_few_tokens_of_wide_heads(head_dim, is_causal, length, monkeypatch):
    monkeypatch.setattr(plans, "_plans", {})
    shapes = (1, 2, length, head_dim), (1, 1, keys_for(length, length), head_dim)
    inputs = random_inputs(*shapes, torch.bfloat16, "cuda")
    allowed = TOLERANCE[torch.bfloat16]  # the second from the plan
    first, second = near_float64(ours, inputs, is_causal, allowed, runs=2, within=poison)
    assert all(torch.equal(first[name], second[name]) for name in first), "one order of additions"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24, 32, 45, 64, 80, 99, 128])
def test_gradients_match_float64(form, head_dim, is_causal, dtype):
    if form == "one launch" and dtype == torch.float32:
        pytest.skip("no such form")
    draw = random.Random(f"{head_dim} {is_causal} {dtype}")
    for _ in range(4):
        inputs, layout = random_problem(draw, head_dim, dtype, (1, 2, 3))
        allowed = TOLERANCE[dtype]  # the second from the plan
        near_float64(ours, inputs, is_causal, allowed, layout, runs=2, within=poison)

"""The closed forms of compiled attention against what Inductor itself counts and calls."""

import functools

import pytest
import torch
from inductor_plans import calls_of, planned

from a2lib.attention import attention_reference
from a2lib.report.metrics import moved_bytes
from a2lib.theory.eager import PASSES, attention_kernels

B, N, D = 2, 64, 16


@pytest.mark.parametrize("causal", [False, True])
def test_bytes_are_those_that_inductor_counts(causal):
    qkv = [torch.randn(B, N, D, requires_grad=True) for _ in range(3)]
    do = torch.randn(B, N, D)
    attention = functools.partial(attention_reference, is_causal=causal)
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    with planned() as graphs:
        torch.autograd.grad(compiled(*qkv), qkv, do)
    for pass_, (code, bytes_) in zip(PASSES, graphs, strict=True):
        kernels = attention_kernels("compile", causal, pass_, B, N, D, 4)
        calls = calls_of(code)
        assert calls.backward == (pass_ == "backward")
        matmul, between = kernels
        assert len(calls.own) + len(calls.library) == matmul.count + between.count
        assert not calls.attentions
        if not causal:
            assert bytes_ == moved_bytes(kernels)
        else:
            # It counts what a kernel writes for itself as well: the masked scores.
            assert 0 <= bytes_ - moved_bytes(kernels) <= 2 * B * N * (N + 2) * 4


@pytest.mark.parametrize("pass_, matrices, masks", [("forward", 10, 2), ("backward", 16, 1)])
def test_eager_with_a_mask_by_hand(pass_, matrices, masks):
    """Matrices read and written, and how often the mask passes, a byte an element."""
    matmul, between = attention_kernels("eager", True, pass_, 1, N, D, 4)
    assert matmul.count == {"forward": 2, "backward": 4}[pass_]
    assert matmul.flops == 2 * N * N * D
    tensors = 2 * matmul.count * N * D * 4
    assert moved_bytes([matmul, between]) == 4 * N * N * matrices + N * N * masks + tensors

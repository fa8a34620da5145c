"""The closed forms of compiled attention against what Inductor itself counts and calls."""

import functools

import pytest
import torch
from inductor_plans import calls_of, planned

from a2lib.attention import attention_reference
from a2lib.theory.eager import PASSES, WRITTEN, attention_kernels, moves

B, N, D = 2, 64, 16


def moved(kernels):
    return sum(k.bytes * k.count for k in kernels)


@pytest.mark.parametrize("written", WRITTEN)
def test_bytes_are_those_that_inductor_counts(written):
    sizes = (B, 1, N, D) if written == "heads" else (B, N, D)
    q, k, v, do = (torch.randn(sizes) for _ in range(4))
    qkv = [x.requires_grad_() for x in (q, k, v)]
    attention = functools.partial(attention_reference, is_causal=written == "causal")
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    with planned() as graphs:
        torch.autograd.grad(compiled(*qkv), qkv, do)
    for pass_, (code, bytes_) in zip(PASSES, graphs, strict=True):
        kernels = attention_kernels("compile", written, pass_, B, N, D, 4)
        calls = calls_of(code)
        assert calls.backward == (pass_ == "backward")
        assert len(calls.own) + len(calls.library) == sum(kernel.count for kernel in kernels)
        assert calls.attentions == (written == "heads")
        if written != "causal":
            assert bytes_ == moved(kernels)
        else:
            # It counts what a kernel writes for itself as well: the masked scores.
            assert 0 <= bytes_ - moved(kernels) <= 2 * B * N * (N + 2) * 4


def test_matrices_by_value():
    assert [moves("eager", "plain", p) for p in PASSES] == [6, 12]
    assert [moves("compile", w, "forward") for w in WRITTEN] == [4, 4, 0]
    assert [moves("compile", w, "backward") for w in WRITTEN] == [7, 7, 0]


@pytest.mark.parametrize("pass_, matrices, masks", [("forward", 10, 2), ("backward", 16, 1)])
def test_eager_with_a_mask_by_hand(pass_, matrices, masks):
    """Matrices read and written, and how often the mask passes, a byte an element."""
    kernels = attention_kernels("eager", "causal", pass_, 1, N, D, 4)
    (products,) = (k for k in kernels if k.flops)
    assert products.count == {"forward": 2, "backward": 4}[pass_]
    assert products.flops == 2 * N * N * D
    tensors = 2 * products.count * N * D * 4
    assert moved(kernels) == 4 * N * N * matrices + N * N * masks + tensors
    assert moves("eager", "causal", pass_) == matrices

"""Each attention that notebooks/flash.ipynb compares is itself or an exception."""

import sys
from types import SimpleNamespace

import pytest
import torch
from attention_inputs import inputs
from notebook_cells import load_cells

from a2lib.attention import UnsupportedError, attention_reference, flash_attention
from a2lib.lab import failures

SIZES = 1, 2, 48, 16


@pytest.fixture
def cells():
    return load_cells("flash")


@pytest.mark.parametrize("name", ["eager", "tiled", "sdpa_flash"])
def test_peers_agree(cells, name):
    q, k, v, _ = inputs("fp32", *SIZES)
    o = cells.MAKE[name](q, k, v, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    assert o.dtype == q.dtype


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_recomputing_backward_gives_the_gradients_of_the_definition(cells, dtype, causal):
    *qkv, do = inputs(dtype, *SIZES)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    o = attention_reference(*exact, causal)
    scores = exact[0] @ exact[1].mT / 16**0.5
    if causal:
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
    lse = scores.logsumexp(-1).float()
    found = cells.recomputed_backward(do, *qkv, o.to(do.dtype), lse, causal)
    right = torch.autograd.grad(o, exact, do.double())
    for name, got, want in zip(("dq", "dk", "dv"), found, right, strict=True):
        limit = {"fp32": 2e-6, "bf16": 2e-2}[dtype]
        assert got.dtype == do.dtype and (got - want).norm() < limit * want.norm(), name


def test_ours_with_a_compiled_backward_is_ours_forward_and_pytorchs_backward(cells, configured):
    """In Triton's interpreter; the backward's code is Inductor's for the CPU."""
    assert torch._dynamo.config.error_on_recompile  # until the fixture ends, which looks
    q, k, v, do = inputs("fp32", *SIZES)
    o = cells.compiled_backward(q, k, v, is_causal=True)
    assert torch.equal(o, flash_attention(q, k, v, is_causal=True))
    want = torch.autograd.grad(attention_reference(q, k, v, True), (q, k, v), do)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        found = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        for name, got, right in zip(("dq", "dk", "dv"), found, want, strict=True):
            torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-4, msg=name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("backend", ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION"])
def test_a_forced_backend_never_falls_back(cells, backend):
    """The CPU has neither; an unforced call would be answered by another backend."""
    q, k, v, _ = inputs("fp32", *SIZES)
    with pytest.raises(RuntimeError) as caught:
        cells.sdpa(backend)(q, k, v, is_causal=True)
    assert failures.classify(caught.value)[0] == "unsupported"


def test_flash_attention_4_takes_heads_behind_tokens_and_the_order_of_sums(cells, monkeypatch):
    asked = []

    def function(q, k, v, causal, deterministic):
        asked.append(deterministic)
        o = attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
        return o.transpose(1, 2), None

    interface = SimpleNamespace(flash_attn_func=function)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    q, k, v, _ = inputs("bf16", *SIZES)
    o = cells.fa4(q, k, v, is_causal=True)
    assert torch.equal(o, attention_reference(q, k, v, True))
    assert asked == [False]
    with pytest.raises(UnsupportedError, match="no fp32"):
        cells.fa4(q.float(), k.float(), v.float(), is_causal=True)

"""The definition itself, and how its products are to be rounded."""

import os

import pytest
import torch
import torch.nn.functional as F
from attention_compare import random_inputs
from programs import printed

from a2lib.attention import FlashAttentionPyTorch, attention_reference


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_queries, n_keys", [(30, 30), (20, 50), (50, 20)])
def test_reference_is_pytorchs_attention(n_queries, n_keys, is_causal):
    q, k, v, _ = random_inputs((2, 4, n_queries, 8), (2, 2, n_keys, 8), torch.float64)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(attention_reference(q, k, v, is_causal), want)


def test_tiled_gradients_by_finite_differences():
    inputs = random_inputs((1, 2, 70, 3), (1, 1, 66, 3), torch.float64)[:3]
    for x in inputs:
        x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, k, v: FlashAttentionPyTorch.apply(q, k, v, True), inputs, fast_mode=True
    )


ASK_FOR_TF32 = """
import os, sys, torch
from a2lib.attention import flash_attention, launches
flash_attention(*[torch.zeros(1, 8, 16)] * 3)  # a first call's imports, once for all
for ask in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        assert not launches._allow_tf32()
        exec(ask)
        assert launches._allow_tf32()
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.zeros(1, 8, 16, dtype=dtype)
            flash_attention(x, x, x)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, ask
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_tf32_is_only_for_those_who_ask(python, monkeypatch):
    """Each in a process of its own: PyTorch's older and newer settings exclude each other."""
    settings = (
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.set_float32_matmul_precision('high')",
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    printed(python(ASK_FOR_TF32, *settings))

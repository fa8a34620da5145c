"""The definition itself."""

import pytest
import torch
import torch.nn.functional as F
from attention_compare import random_inputs

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

"""A wrong output or gradient is found, and rounding is not taken for one."""

import pytest
import torch
from attention_inputs import inputs
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from a2lib.attention import FlashAttentionPyTorch, attention_reference
from a2lib.lab import sanity


def results(dtype, *sizes, causal=True, forward=attention_reference, seed=0):
    q, k, v, do = inputs(dtype, *sizes, seed=seed)
    expected = sanity.Expected(q, k, v, do, causal=causal, dtype=dtype)
    o = forward(q, k, v, causal)
    return expected, o.detach(), torch.autograd.grad(o, (q, k, v), expected.do)


@pytest.mark.parametrize("forward", [attention_reference, FlashAttentionPyTorch.apply])
@given(
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    n=st.sampled_from([1, 2, 5, 64, 130, 300]),
    d=st.sampled_from([4, 16, 64]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rounding_passes(forward, dtype, n, d, causal, seed):
    expected, o, gradients = results(dtype, 1, 2, n, d, causal=causal, forward=forward, seed=seed)
    expected.check_output(o)
    expected.check_gradients(*gradients)


def test_grouped_keys_have_gradients_of_the_whole_group():
    group = 2
    q, _, _, do = inputs("fp32", 2, 4, 96, 32)
    _, k, v, _ = inputs("fp32", 2, 4 // group, 96, 32, seed=1)
    expected = sanity.Expected(q, k, v, do, causal=True, dtype="fp32")
    expected.check(lambda *qkv: attention_reference(*qkv, True), (q, k, v))

    def of_one_head(q, k, v):
        k_shared = k.repeat_interleave(group, dim=1).detach()
        v_shared = v.repeat_interleave(group, dim=1).detach()
        o = attention_reference(q, k_shared, v_shared, True)
        return o + 0 * attention_reference(q, k, v, True)

    with pytest.raises(sanity.WrongResult, match="dk"):
        expected.check(of_one_head, (q, k, v))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("fault", [0.8, float("nan")])
def test_a_wrong_gradient_is_found_and_named(which, fault):
    expected, _, gradients = results("bf16", 1, 2, 96, 32)
    spoilt = list(gradients)
    spoilt[which] = fault * spoilt[which]
    name = ("dq", "dk", "dv")[which]
    refused(name, expected.check_gradients, *spoilt, error=sanity.WrongResult)


def test_one_wrong_row_is_found_among_many_heads():
    expected, o, _ = results("bf16", 4, 8, 256, 16)
    expected.check_output(o)
    o[2, 5, expected.rows[-1], :] *= 1.3
    refused("wrong o", expected.check_output, o, error=sanity.WrongResult)


def test_tf32_products_are_not_fp32():
    q, k, v, do = inputs("fp32", 1, 1, 128, 64)
    expected = sanity.Expected(q, k, v, do, causal=True, dtype="fp32")

    def tf32(x):  # 10 bits of mantissa are kept
        return (x.detach().view(torch.int32) & ~0x1FFF).view(torch.float32)

    o = attention_reference(tf32(q), tf32(k), tf32(v), True)
    refused("wrong o", expected.check_output, o, error=sanity.WrongResult)


def test_an_infinity_elsewhere_is_found():
    expected, o, _ = results("fp32", 1, 1, 256, 16)
    assert 1 not in expected.rows
    o[..., 1, 0] = float("inf")
    refused("o is not finite", expected.check_output, o, error=sanity.WrongResult)

"""The Triton kernels on a real GPU: against float64, and against PyTorch's own error."""

import gc
import math
import random

import attention_compare as compare
import pytest
import torch
import torch.nn.functional as F
from attention_compare import NAMES, errors, in_float64, near_float64, random_inputs, with_gradients
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from a2lib.attention import (
    FlashAttentionTriton,
    attention_reference,
    dispatch,
    flash_attention,
    launches,
)
from a2lib.lab import peak_bytes

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
ours = FlashAttentionTriton.apply


def cudnn(q, k, v, is_causal):
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


# The widths that kernels are compiled for, dearest first, and the head sizes that share each.
HEAD_DIMS = {128: (65, 128), 64: (33, 64), 32: (17, 32), 16: (16, 16)}


def check(dtype, is_causal, width, seed):
    """One problem twice: each result is near float64's, and the second the first to the bit."""
    draw = random.Random(f"{dtype} {is_causal} {width} {seed}")
    low, high = HEAD_DIMS[width]
    head_dim = draw.choice([high, max(low, width * 3 // 4), draw.randint(low, high)])
    inputs, layout = compare.random_problem(draw, head_dim, dtype, (1, 2, 4), longest=700)
    first, again = near_float64(
        ours, inputs, is_causal, TOLERANCE[dtype], layout, runs=2, within=compare.filled_with_nan
    )
    for name in NAMES:
        assert torch.equal(first[name], again[name]), f"{name} differs: {inputs[0].shape}"


# Each example compiles kernels of its own, so that many cases of few examples share them out among
# workers. Without shrinking, which would compile as many again.
@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", list(HEAD_DIMS))
@settings(
    max_examples=max(3, settings.default.max_examples // 8), phases=[Phase.explicit, Phase.generate]
)
@given(seed=st.integers(0, 2**32 - 1))
def test_matches_float64(width, dtype, is_causal, seed):
    check(dtype, is_causal, width, seed)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", list(HEAD_DIMS))
def test_keys_in_chunks(width, dtype, is_causal, monkeypatch):
    """However few there are; twice, the long way and as what ran before."""
    monkeypatch.setattr(dispatch, "keys_per_chunk", lambda *_: 128)
    monkeypatch.setattr(launches, "_kept", {})
    for seed in range(3):
        check(dtype, is_causal, width, seed)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("n_queries, n_keys", [(300, 0), (0, 300)])
def test_empty_lengths(n_queries, n_keys, dtype, head_dim):
    """Of other operands than the interpreter's: what is not there has the dtype of what is."""
    shapes = (1, 2, n_queries, head_dim), (1, 2, n_keys, head_dim)
    results = with_gradients(ours, *random_inputs(*shapes, dtype, "cuda"), False)
    for name, result in results.items():
        assert (result == 0).all(), name


@pytest.fixture(params=["chunks", "one launch"])
def form(request, monkeypatch):
    """Every backward is of one form, where there is a kernel."""
    monkeypatch.setattr(dispatch, "in_chunks", lambda *_: request.param == "chunks")
    monkeypatch.setattr(
        dispatch, "in_two_terms", lambda call: call.head_dim > 64 and call.dtype == "fp32"
    )
    monkeypatch.setattr(dispatch, "in_one_launch", lambda *_: request.param == "one launch")
    monkeypatch.setattr(launches, "_kept", {})
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24, 32, 45, 64, 80, 99, 128])
def test_gradients_of_one_form(form, head_dim, is_causal, dtype):
    if form == "one launch" and dtype == torch.float32:
        pytest.skip("no such form")
    draw = random.Random(f"{head_dim} {is_causal} {dtype}")
    for _ in range(4):
        inputs, layout = compare.random_problem(draw, head_dim, dtype, (1, 2, 3))
        allowed = max(TOLERANCE[dtype], 1e-5)  # the second as what ran before
        near_float64(ours, inputs, is_causal, allowed, layout, runs=2, within=compare.poison)


def check_beside(other, allowed, shape, dtype, is_causal, size=1):
    """Relative errors to float64 on the same inputs, by name; a fresh draw each run."""
    q, *rest = random_inputs(shape, shape, dtype, "cuda")
    inputs = q * size, *rest
    truth = in_float64(*inputs, is_causal)
    mine = errors(with_gradients(ours, *inputs, is_causal), truth)
    its = errors(with_gradients(other, *inputs, is_causal), truth)
    for name in NAMES:
        assert mine[name] <= allowed * its[name], (name, mine, its)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128])
@pytest.mark.parametrize("length", [333, 2048])
def test_bf16_error_is_at_most_a_quarter_above_cudnn(length, head_dim, is_causal):
    check_beside(cudnn, 1.25, (2, 4, length, head_dim), torch.bfloat16, is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
@pytest.mark.parametrize("length", [256, 333, 1024])
def test_fp32_error_is_at_most_twice_eager(length, head_dim, is_causal):
    check_beside(attention_reference, 2, (2, 2, length, head_dim), torch.float32, is_causal)


@pytest.mark.parametrize("size, head_dim", [(3, 64), (10, 64), (3, 128)])
def test_fp32_error_when_scores_are_large(size, head_dim):
    """A log-sum-exp rounded on the way to base 2 and back would show here, in dv first, and passes
    that multiply by other terms."""
    check_beside(attention_reference, 2.5, (2, 333, head_dim), torch.float32, True, size)


def test_tf32_is_not_for_attention(monkeypatch):
    q, k, v, _ = random_inputs((2, 256, 64), (2, 256, 64), torch.float32, "cuda")
    want = ours(q, k, v, True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert torch.equal(ours(q, k, v, True), want)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("is_causal", [False, True])
def test_huge_logits_are_finite(dtype, is_causal):
    q, k, v, do = random_inputs((1, 2, 500, 64), (1, 2, 500, 64), dtype, "cuda")
    results = with_gradients(ours, q * 60, k * 60, v, do, is_causal)
    truth = in_float64(q * 60, k * 60, v, do, is_causal)
    for name, result in results.items():
        assert result.isfinite().all(), name
    assert errors(results, truth)["o"] < 0.05


def test_keys_at_minus_infinity_weigh_nothing():
    q, k, v, _ = random_inputs((1, 300, 64), (1, 400, 64), torch.bfloat16, "cuda")
    q[..., 0] = q[..., 0].abs() + 0.1
    k[..., :290, 0] = -math.inf
    o, want = flash_attention(q, k, v), attention_reference(q.double(), k.double(), v.double())
    assert want.isfinite().all()
    torch.testing.assert_close(o.double(), want, atol=2e-2, rtol=2e-2)


def test_a_misaligned_tensor_after_an_aligned_one_of_the_same_shape():
    """The compiled kernel kept for the first reads 16 bytes at a time, which the second cannot."""
    shape = (1, 2, 200, 64)
    storage = torch.randn(4, 2 * 200 * 64 + 8, device="cuda").to(torch.bfloat16)
    for offset in (0, 1, 8, 3, 0):
        inputs = [x[offset : offset + 2 * 200 * 64].view(shape) for x in storage]
        near_float64(ours, inputs, True, TOLERANCE[torch.bfloat16])


def test_offsets_beyond_31_bits():
    """Row offsets of more than 2**31 elements, in a view that costs little to attend over."""
    n, width = 2**17 + 40, 2**14 + 128
    big = torch.empty(1, n, width, dtype=torch.float16, device="cuda")
    q = torch.randn(1, 64, 64, dtype=torch.float16, device="cuda")
    k, v = big[..., :64], big[..., 64:128]
    assert k.stride(1) * (n - 1) > 2**31
    k.normal_()
    v.normal_()
    want = attention_reference(q.double(), k.double(), v.double())
    assert compare.off_by(flash_attention(q, k, v), want) < TOLERANCE[torch.float16]


def test_memory_grows_with_length_not_its_square(no_garbage):
    def peak(n):
        inputs = random_inputs((1, 4, n, 64), (1, 4, n, 64), torch.bfloat16, "cuda")

        def call():
            with_gradients(ours, *inputs, True)

        call()  # what a first call alone allocates, and what compiling leaves to be collected
        gc.collect()
        return peak_bytes(call)

    short, long = peak(4096), peak(8192)
    assert 0 < short < long <= 2.5 * short


def few():
    """Inputs whose two passes are one kernel of plain Triton each."""
    return random_inputs((2, 4, 40, 16), (2, 4, 40, 16), torch.float16, "cuda")


def assert_near(results, *inputs):
    compare.assert_near(results, in_float64(*inputs, True), TOLERANCE[inputs[0].dtype])


def test_captured_in_a_cuda_graph():
    inputs, stream = few(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with_gradients(ours, *inputs, True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = with_gradients(ours, *inputs, True)
    for x in inputs:
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert_near(captured, *inputs)


def test_on_another_stream():
    inputs, stream = few(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        results = with_gradients(ours, *inputs, True)
    torch.cuda.current_stream().wait_stream(stream)
    assert_near(results, *inputs)

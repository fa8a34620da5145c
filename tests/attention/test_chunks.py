"""The backward in chunks of queries, in Triton's interpreter: gradients by name against float64."""

import attention_compare as compare
import pytest
import torch
from attention_compare import (
    assert_near,
    drawn,
    in_float64,
    problems,
    random_inputs,
    scaled,
    with_gradients,
)
from attention_standins import use_tile, watch_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from a2lib.attention import dispatch, launches
from a2lib.attention.dispatch import in_chunks, in_two_terms

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")
SIDES = [(64, 64), (64, 128), (32, 16), (16, 32)]


@pytest.fixture(scope="module")
def in_few_chunks():
    """Every backward is in chunks, of a GPU and a tile that each test chooses, and each new tensor
    is full of NaN: an element that nobody sets shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "in_one_launch", lambda *_: False)
        patch.setattr(dispatch, "in_chunks", lambda *_: True)
        patch.setattr(
            dispatch, "in_two_terms", lambda call: call.head_dim > 64 and call.dtype == "fp32"
        )
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
        patch.setattr(launches, "_kept", {})
        with compare.filled_with_nan():
            yield patch


def run(patch, inputs, causal, sides=(64, 64), multiprocessors=64, scale=None):
    """o and the gradients, and which kernels were launched."""
    for BD in (16, 32, 64, 128):
        for precision in ("ieee", "bf16x6"):
            use_tile(patch, ("backward_chunks", precision, BD), (*sides, 4, 1))
    use_tile(patch, ("backward_wide", "fp16x3", 128), (*sides, 4, 1))
    patch.setattr(launches, "n_multiprocessors", lambda device: multiprocessors)
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        watch_steps(patch, steps)
        results = with_gradients(scaled(scale), *inputs, causal)
    launched = [step.kernel for step in steps]
    assert "backward_dq" not in launched
    return results, launched


PROBLEMS = problems(
    st.integers(1, 70) | st.sampled_from([16, 31, 32, 33, 64, 65, 129]),
    st.integers(1, 64) | st.sampled_from([16, 32, 64, 66, 80, 100, 128]),
    (torch.float16, torch.float32),
    scale=st.sampled_from([None, 0.3]),
    sides=st.sampled_from(SIDES),
    multiprocessors=st.sampled_from([1, 4, 16, 64]),
)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 4)  # of some seconds each
@given(p=PROBLEMS)
def test_gradients_match_float64(in_few_chunks, p):
    inputs = drawn(p)
    truth = in_float64(*inputs, p["is_causal"], p["scale"])
    inputs = [compare.laid_out(x, p["layout"]) for x in inputs]
    tile = p["sides"], p["multiprocessors"]
    results, _ = run(in_few_chunks, inputs, p["is_causal"], *tile, p["scale"])
    assert_near(results, truth, {torch.float16: 1e-2, torch.float32: 1e-5}[p["dtype"]])


def test_keys_at_the_ragged_end_weigh_nothing(in_few_chunks):
    """Scores far below zero: the weight of a key that is not there, of score 0, would be infinite,
    and so would dQ."""
    q, k, v, do = random_inputs((1, 40, 16), (1, 40, 16), torch.float32)
    q[..., 0], k[..., 0] = 200.0, -20.0
    for causal in (False, True):
        results, _ = run(in_few_chunks, (q, k, v, do), causal)
        assert_near(results, in_float64(q, k, v, do, causal), 1e-3)


SCALES = {
    "q and v small": (1e-10, 1e10, 1e-20, 1e20),
    "rows": (1, 1, torch.logspace(6, -6, 70)[:, None], torch.logspace(-6, 6, 40)[:, None]),
}


@pytest.mark.slow
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
def test_two_terms_have_the_range_of_fp32(in_few_chunks, scales):
    """Where fp16 alone ends at 65,504: relative errors of a few roundings, whatever the size."""
    inputs = random_inputs((1, 2, 40, 66), (1, 1, 70, 66), torch.float32)
    inputs = [x * scale for x, scale in zip(inputs, scales, strict=True)]
    found, launched = run(in_few_chunks, inputs, True, (32, 64))
    assert "backward_wide" in launched
    for name, want in in_float64(*inputs, True).items():
        error = (found[name].double() - want).norm() / want.norm()
        assert error <= 2**-20, (name, error)  # at most 10 * 2**-24 in 12 draws


def test_a_few_gradients_of_two_terms_are_those_of_all(in_few_chunks):
    inputs = random_inputs((1, 2, 40, 66), (1, 1, 33, 66), torch.float32)
    want, _ = run(in_few_chunks, inputs, True, (32, 32))
    o, lse = launches.forward(*inputs[:3], True, None)
    for _ in range(2):  # the second may be as what ran before
        for needs in ((True, False, False), (False, True, True), (False, False, True)):
            got = launches.backward(inputs[3], *inputs[:3], o, lse, True, None, needs)
            for x, name, needed in zip(got, ("dq", "dk", "dv"), needs, strict=True):
                assert torch.equal(x, want[name]) if needed else x is None


@pytest.mark.parametrize(
    "n_queries, d, fixed_order, two",
    [(256, 128, False, True), (255, 128, False, False), (256, 64, False, False),
     (256, 128, True, False)],
)  # fmt: skip
def test_both_passes_multiply_alike(monkeypatch, n_queries, d, fixed_order, two):
    steps = []
    for chosen in (in_chunks, in_two_terms):  # not the fixture's
        monkeypatch.setattr(dispatch, chosen.__name__, chosen)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: fixed_order)
    watch_steps(monkeypatch, steps, launch=False)
    q, do = torch.empty(2, 1, 2, n_queries, d)
    k, v = torch.empty(2, 1, 1, 300, d)
    o, lse = launches.forward(q, k, v, True, None)

    def splits():
        return [step.options["PRECISION"] for step in steps if step.kernel == "split"]

    forward = splits()
    assert forward == ["fp16x3" if two else "bf16x6"]
    for needs in ((True, True, True), (True, False, False)):
        steps.clear()
        launches.backward(do, q, k, v, o, lse, True, None, needs)
        assert splits() == 2 * forward
        assert ("backward_wide" in [step.kernel for step in steps]) == two

"""The backward in chunks of queries, in Triton's interpreter: gradients by name against float64."""

import attention_compare as compare
import pytest
import torch
from attention_compare import drawn, errors, in_float64, problems, random_inputs, with_gradients
from attention_standins import use_tile, watch_steps
from hypothesis import example, given, settings
from hypothesis import strategies as st

from a2lib.attention import dispatch, flash_attention, launches
from a2lib.attention.dispatch import Call, Tile, chunk_of, chunk_programs, in_chunks, in_two_terms

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
    """o and the gradients, and how many programs each launch of the backward had."""
    for BD in (16, 32, 64, 128):
        for family in ("16bit", "fp32"):
            use_tile(patch, ("backward_chunks", family, BD, causal), (*sides, 4, 1))
    use_tile(patch, ("backward_wide", "fp16x3", 128, causal), (*sides, 4, 1))
    patch.setattr(launches, "n_multiprocessors", lambda device: multiprocessors)
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        watch_steps(patch, steps)
        results = with_gradients(
            lambda q, k, v, c: flash_attention(q, k, v, is_causal=c, scale=scale), *inputs, causal
        )
    launched = {step.kernel: step.n_programs for step in steps}
    assert "backward_dq" not in launched
    return results, launched


PROBLEMS = problems(
    st.integers(1, 70) | st.sampled_from([16, 31, 32, 33, 64, 65, 129]),
    st.integers(1, 64) | st.sampled_from([16, 32, 64, 66, 80, 100, 128]),
    (torch.float16, torch.float32),
    sides=st.sampled_from(SIDES),
    multiprocessors=st.sampled_from([1, 4, 16, 64]),
)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 4)  # of some seconds each
@given(p=PROBLEMS)
def test_gradients_match_float64(in_few_chunks, p):
    inputs = drawn(p)
    truth = in_float64(*inputs, p["is_causal"])
    inputs = [compare.laid_out(x, p["layout"]) for x in inputs]
    results, _ = run(in_few_chunks, inputs, p["is_causal"], p["sides"], p["multiprocessors"])
    for name, error in errors(results, truth).items():
        assert error <= {torch.float16: 1e-2, torch.float32: 1e-5}[p["dtype"]], (name, error)


def test_scale(in_few_chunks):
    inputs = random_inputs((60, 16), (40, 16), torch.float32)
    results, _ = run(in_few_chunks, inputs, True, (16, 32), scale=0.3)
    found = errors(results, in_float64(*inputs, True, scale=0.3))
    assert all(error <= 1e-5 for error in found.values()), found


def test_keys_at_the_ragged_end_weigh_nothing(in_few_chunks):
    """Scores far below zero: the weight of a key that is not there, of score 0, would be infinite,
    and so would dQ."""
    q, k, v, do = random_inputs((1, 40, 16), (1, 40, 16), torch.float32)
    q[..., 0], k[..., 0] = 200.0, -20.0
    for causal in (False, True):
        results, _ = run(in_few_chunks, (q, k, v, do), causal)
        found = errors(results, in_float64(q, k, v, do, causal))
        assert all(error <= 1e-3 for error in found.values()), found  # max() passes over a NaN


some_tile = st.sampled_from([Tile(q, k, 4, 1) for q, k in SIDES])
tokens, chunks = st.integers(1, 3000), st.none() | st.sampled_from([128, 384, 1152])


@given(some_tile, tokens, tokens, st.integers(1, 64), st.booleans(), st.integers(0, 132), chunks)
@example(Tile(64, 128, 8, 2), 16384, 16384, 1, True, 132, None)
def test_programs_are_the_chunks_that_see_something(
    tile, n_queries, n_keys, heads, causal, many, chunk
):
    call = Call("bf16", 1, heads, heads, n_queries, n_keys, 64, causal, many)
    chunk = chunk or chunk_of(tile, call)
    assert chunk % tile.Bq == chunk % tile.Bk == 0
    seen = sum(
        not causal or n0 // chunk <= m0 // chunk
        for n0 in range(0, n_keys, tile.Bk)
        for m0 in range(0, n_queries, chunk)
    )
    assert chunk_programs(tile, chunk, call) == seen


def test_few_tokens_have_a_program_for_each_pair_of_tiles(in_few_chunks):
    inputs = random_inputs((2, 96, 16), (2, 96, 16), torch.float16)
    _, launched = run(in_few_chunks, inputs, True, (32, 16))
    pairs = 2 * (1 + 2 + 3)
    assert launched["backward_chunks"] == 2 * pairs


SCALES = {
    "q and v small": (1e-10, 1e10, 1e-20, 1e20),
    "k and do small": (1e20, 1e-20, 1e20, 1e-20),
    "rows": (1, 1, *(10.0 ** torch.linspace(x, -x, n)[:, None] for x, n in ((6, 70), (-6, 40)))),
}


@pytest.mark.slow
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("causal", [True, False])
def test_two_terms_have_the_range_of_fp32(in_few_chunks, causal, scales):
    """Where fp16 alone ends at 65,504: relative errors of a few roundings, whatever the size."""
    inputs = random_inputs((1, 2, 40, 66), (1, 1, 70, 66), torch.float32)
    inputs = [x * scale for x, scale in zip(inputs, scales, strict=True)]
    found, launched = run(in_few_chunks, inputs, causal, (32, 64))
    assert "backward_wide" in launched
    for name, want in in_float64(*inputs, causal).items():
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
    "n_queries, d, mode, two",
    [(256, 128, None, True), (255, 128, None, False), (256, 65, None, True), (256, 64, None, False),
     (256, 128, "tf32", False), (256, 128, "fixed order", False)],
)  # fmt: skip
def test_both_passes_multiply_alike(monkeypatch, n_queries, d, mode, two):
    steps = []
    for chosen in (in_chunks, in_two_terms):  # not the fixture's
        monkeypatch.setattr(dispatch, chosen.__name__, chosen)
    monkeypatch.setattr(
        torch, "are_deterministic_algorithms_enabled", lambda: mode == "fixed order"
    )
    monkeypatch.setattr(launches, "_allow_tf32", lambda: mode == "tf32")
    watch_steps(monkeypatch, steps, launch=False)
    q, do = torch.empty(2, 1, 2, n_queries, d)
    k, v = torch.empty(2, 1, 1, 300, d)
    o, lse = launches.forward(q, k, v, True, None)
    splits = [step.constants["PRECISION"] for step in steps if step.kernel == "split"]
    assert splits == ([] if mode == "tf32" else ["fp16x3" if two else "bf16x6"])
    for needs in ((True, True, True), (True, False, False)):
        steps.clear()
        launches.backward(do, q, k, v, o, lse, True, None, needs)
        again = [step.constants["PRECISION"] for step in steps if step.kernel == "split"]
        assert again == 2 * splits and ("backward_wide" in [step.kernel for step in steps]) == two

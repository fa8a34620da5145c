"""The backward in chunks of queries, in Triton's interpreter: gradients by name against float64."""

import attention_compare as compare
import pytest
import torch
from attention_compare import drawn, errors, in_float64, problems, random_inputs, with_gradients
from attention_standins import choose, choose_forms
from hypothesis import given, settings
from hypothesis import strategies as st

from a2lib.attention import dispatch, flash_attention, passes
from a2lib.attention.dispatch import Tile
from a2lib.theory.attention import tiled_memory

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")
SIDES = [(64, 64), (64, 128), (32, 16), (16, 32)]
queries_per_chunk, tiles_of = dispatch.queries_per_chunk, dispatch.tiles


def form_of(case):
    """Chunks, in fp32 of wide heads of two terms."""
    if case.precision == "fp16x3":
        return "two_terms"
    return "chunks" if case.wants_all else "two_sweeps"


@pytest.fixture(scope="module")
def in_few_chunks():
    """Every backward is in chunks, of a GPU and a tile that each test chooses, and each new tensor
    is full of NaN: an element that nobody sets shows."""
    with pytest.MonkeyPatch.context() as patch:
        two = {"has_two_terms": lambda case: case.dtype == "fp32" and case.head_dim > 64}
        choose(patch, backward_form=form_of, **two)
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
        with compare.filled_with_nan():
            yield patch


def run(patch, inputs, causal, sides=(64, 64), multiprocessors=64, scale=None):
    """o and the gradients, and how many programs each plain launch of the backward had."""
    launched = {}
    count = dispatch.n_programs
    gpu = dispatch.Gpu(multiprocessors)

    def tiles(kernel, case):
        is_chunked = kernel in ("backward_chunks", "backward_wide")
        return (Tile(*sides, 4, 1),) if is_chunked else tiles_of(kernel, case)

    def n_programs(kernel, case, tile):
        launched[kernel] = count(kernel, case, tile)
        return launched[kernel]

    def chunk(tile, case):
        return queries_per_chunk(tile, case._replace(gpu=gpu))

    with pytest.MonkeyPatch.context() as patch:
        choose(patch, tiles=tiles, n_programs=n_programs, queries_per_chunk=chunk)
        results = with_gradients(
            lambda q, k, v, c: flash_attention(q, k, v, is_causal=c, scale=scale), *inputs, causal
        )
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


@pytest.mark.parametrize("n_queries, n_keys", [(40, 0), (0, 40)])
def test_empty_lengths_are_the_other_ways(n_queries, n_keys):
    inputs = random_inputs((2, n_queries, 16), (2, n_keys, 16), torch.float32)
    results = with_gradients(lambda *x: flash_attention(*x[:3], is_causal=x[3]), *inputs, True)
    assert all((x == 0).all() for x in results.values())


def test_few_tokens_have_a_program_for_each_pair_of_tiles(in_few_chunks):
    inputs = random_inputs((2, 96, 16), (2, 96, 16), torch.float16)
    _, launched = run(in_few_chunks, inputs, True, (32, 16))
    pairs = 2 * (1 + 2 + 3)
    assert launched["backward_chunks"] == 2 * pairs


def test_scratch_is_what_is_counted(in_few_chunks, monkeypatch):
    made, kernel = {}, passes.chunks.prepare_chunks_kernel

    class Spy:
        def __getitem__(self, grid):
            def launch(*args, **options):
                made.update(zip(("rows", "dq_sums", "dk_sums", "dv_sums"), args[3:7], strict=True))
                return kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(passes.chunks, "prepare_chunks_kernel", Spy())
    run(in_few_chunks, random_inputs((2, 3, 40, 16), (2, 3, 70, 16), torch.float16), True)
    held = tiled_memory(2, 3, 40, 70, 16, 2, "backward", query_chunks=True)
    assert {name: x.nbytes for name, x in made.items()} == {name: held[name] for name in made}
    assert set(held) - set(made) == {"dq", "dk", "dv"}


@pytest.mark.parametrize("wanted", ["qk", "v"])
def test_fewer_gradients_are_two_sweeps(monkeypatch, wanted):
    choose_forms(monkeypatch, backward="chunks")
    inputs = dict(zip("qkv", random_inputs((2, 20, 16), (2, 20, 16), torch.float32), strict=False))
    for name in wanted:
        inputs[name].requires_grad_()
    flash_attention(*inputs.values()).sum().backward()
    assert all((x.grad is not None) == (name in wanted) for name, x in inputs.items())


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
    o, lse = passes.forward(*inputs[:3], True, None)
    whole = passes.backward(inputs[3], *inputs[:3], o, lse, True, None, (True, True, True))
    want = dict(zip(("dq", "dk", "dv"), whole, strict=True))
    for needs in ((True, False, False), (False, True, True), (False, False, True)):
        got = passes.backward(inputs[3], *inputs[:3], o, lse, True, None, needs)
        for x, name, needed in zip(got, ("dq", "dk", "dv"), needs, strict=True):
            assert torch.equal(x, want[name]) if needed else x is None

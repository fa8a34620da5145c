"""The backward in chunks of queries, in Triton's interpreter: gradients by name against float64."""


import pytest
import torch
from attention_compare import (
    LAYOUTS,
    errors,
    in_float64,
    laid_out,
    random_inputs,
    with_gradients,
)
from hypothesis import given
from hypothesis import strategies as st

from a2lib.attention import flash_attention, passes, plans
from a2lib.attention.tiles import TILES, Tile

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")
SIDES = [(64, 64), (64, 128), (32, 16), (16, 32)]


@pytest.fixture(scope="module")
def in_few_chunks():
    """Every backward is in chunks, of a GPU and a tile that each test chooses, and each new tensor
    is full of NaN: an element that nobody sets shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "in_chunks", lambda *_: True)
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
        torch.use_deterministic_algorithms(True)
        yield patch
        torch.use_deterministic_algorithms(False)
    plans._plans.clear()


def run(patch, inputs, causal, sides=(64, 64), multiprocessors=64, scale=None):
    """o and the gradients, and how many programs each launch of the backward had."""
    for BD in (16, 32, 64, 128):
        key = ("backward_chunks", "16bit", BD, causal)
        patch.setitem(TILES, key, (Tile(*sides, 4, 1),))
        patch.setitem(TILES, ("backward_chunks", "fp32", BD, causal), TILES[key])
    patch.setattr(passes, "n_multiprocessors", lambda device: multiprocessors)
    launched = {}
    real = passes.launch

    def launch(kernel, apart, n_programs, *rest):
        launched[apart[0]] = n_programs
        return real(kernel, apart, n_programs, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "launch", launch)
        results = with_gradients(
            lambda q, k, v, c: flash_attention(q, k, v, is_causal=c, scale=scale), *inputs, causal
        )
    assert "backward_dq" not in launched
    return results, launched


@st.composite
def problems(draw):
    length = st.integers(1, 150) | st.sampled_from([16, 31, 32, 33, 64, 127, 128, 129, 256])
    kv_heads = draw(st.integers(1, 2))
    return {
        "batch": draw(st.integers(1, 2)),
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 3)),
        "n_queries": draw(length),
        # Through a softmax over a single key no gradient flows: nothing to be relative to.
        "n_keys": draw(length.filter(lambda n: n > 1)),
        "d": draw(st.integers(1, 64) | st.sampled_from([16, 32, 64, 80, 128])),
        "causal": draw(st.booleans()),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "dtype": draw(st.sampled_from([torch.float16, torch.float32])),
        "sides": draw(st.sampled_from(SIDES)),
        "multiprocessors": draw(st.sampled_from([1, 4, 16, 64])),
        "seed": draw(st.integers(0, 2**16)),
    }


@pytest.mark.slow
@given(p=problems())
def test_gradients_match_float64(in_few_chunks, p):
    generator = torch.Generator().manual_seed(p["seed"])
    q_shape = (p["batch"], p["heads"], p["n_queries"], p["d"])
    kv_shape = (p["batch"], p["kv_heads"], p["n_keys"], p["d"])
    inputs = random_inputs(q_shape, kv_shape, p["dtype"], generator=generator)
    truth = in_float64(*inputs, p["causal"])
    inputs = [laid_out(x, p["layout"]) for x in inputs]
    results, _ = run(in_few_chunks, inputs, p["causal"], p["sides"], p["multiprocessors"])
    for name, error in errors(results, truth).items():
        assert error <= {torch.float16: 1e-2, torch.float32: 1e-5}[p["dtype"]], (name, error)

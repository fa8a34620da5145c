"""The forward whose keys several programs share, in Triton's interpreter: against float64, and
which program has which tile and chunk."""

import math

import attention_compare as compare
import pytest
import torch
from attention_compare import drawn, filled_with_nan, off_by, problems, random_inputs
from attention_standins import use_tile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from a2lib.attention import (
    attention_reference,
    dispatch,
    launches,
)
from a2lib.attention.tiles import TILES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2}
ENTRIES = [key for key in TILES if key[0] == "forward_chunk"]
SHAPES = [(32, 32), (32, 64), (64, 32), (16, 32)]


@pytest.fixture(autouse=True)
def chunked(monkeypatch):
    """Forwards are in chunks of 64 keys, in small tiles, and new tensors full of NaN."""
    monkeypatch.setattr(dispatch, "keys_per_chunk", lambda *_: 64)
    for key in ENTRIES:
        use_tile(monkeypatch, key, (32, 32, 4, 1))
    monkeypatch.setattr(launches, "_kept", {})
    with filled_with_nan():
        yield monkeypatch


def truth_of(q, k, v, is_causal):
    """o and the log-sum-exp in float64."""
    o = attention_reference(q.double(), k.double(), v.double(), is_causal)
    return o, compare.log_sum_exp(q, k, is_causal)


LENGTHS = st.integers(1, 200) | st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129, 192])
HEAD_DIMS = st.integers(16, 128) | st.sampled_from([16, 32, 64, 128])


@pytest.mark.slow
# A quarter of the examples, since each takes seconds; and each sets the tile itself.
@settings(
    max_examples=settings.default.max_examples // 4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(problems(LENGTHS, HEAD_DIMS, TOLERANCE, tile=st.sampled_from(SHAPES)))
def test_matches_float64(chunked, p):
    q, k, v, _ = drawn(p)
    o, lse = truth_of(q, k, v, p["is_causal"])
    for key in ENTRIES:
        use_tile(chunked, key, (*p["tile"], 4, 1))
    laid_out = [compare.laid_out(x, p["layout"]) for x in (q, k, v)]
    got_o, got_lse = launches.forward(*laid_out, p["is_causal"], None)
    assert off_by(got_o, o) <= TOLERANCE[p["dtype"]]
    torch.testing.assert_close(got_lse.double(), lse, atol=1e-4, rtol=1e-5)


def test_chunks_whose_scores_are_all_minus_infinity():
    """As an additive mask would leave them: some chunks of some rows, then every chunk."""
    q, k, v, _ = random_inputs((1, 1, 70, 16), (1, 1, 150, 16), torch.float32)
    q[..., 0] = q[..., 0].abs() + 0.1
    k[..., 20:140, 0] = -math.inf
    o, lse = launches.forward(q, k, v, False, None)
    want = truth_of(q, k, v, False)
    torch.testing.assert_close(o.double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want[1], atol=1e-5, rtol=1e-5)
    k[..., 0] = -math.inf
    o, lse = launches.forward(q, k, v, False, None)
    assert (o == 0).all() and (lse == -math.inf).all()

"""The ladder: that each rung computes attention, and what the lowest looks at.

test_dispatch.py has which kernels and tiles each rung is."""

import pytest
import torch
from attention_inputs import inputs
from refusals import refused

from a2lib.attention import sanity
from a2lib.attention.dispatch import LIBRARY, RUNGS
from a2lib.attention.ladder import HOPPER, at_rung
from a2lib.errors import UnsupportedError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")


def test_the_lowest_looks_at_keys_that_no_query_sees():
    *qkv, _ = inputs("bf16", 1, 1, 256, 64)
    with torch.no_grad():
        qkv[2][..., -1, :] = float("nan")
    every, half = (at_rung(rung, "cpu")(*qkv, True) for rung in ("every_tile", "to_diagonal"))
    assert not every[..., :128, :].isfinite().any() and half[..., :128, :].isfinite().all()


@pytest.mark.parametrize(
    "rung, seq_len, causal",
    [("every_tile", 200, True), ("to_diagonal", 200, True), ("every_tile", 130, False),
     ("two_loops", 200, True), ("tuned_tiles", 200, True), (LIBRARY, 200, True)],
)  # fmt: skip
def test_no_rung_changes_a_result(rung, seq_len, causal):
    *qkv, do = inputs("bf16", 1, 1, seq_len, 32)
    expected = sanity.Expected(*qkv, do, causal=causal, dtype="bf16")
    attention = at_rung(rung, "cpu")
    expected.check(lambda q, k, v: attention(q, k, v, causal), qkv)


def test_a_rung_that_is_none_or_has_no_kernels_here_is_refused():
    refused("no rung two_lops .did you mean two_loops", at_rung, "two_lops", "cpu")
    assert set(HOPPER) < set(RUNGS)
    for name in HOPPER:
        refused("compute capability 9.0", at_rung, name, "cpu", error=UnsupportedError)

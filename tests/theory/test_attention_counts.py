"""Closed forms of attention against a count of every multiply-add."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from a2lib.theory.attention import PASSES, attention_bytes, attention_flops

size = st.integers(min_value=1, max_value=7)
large = st.integers(min_value=1, max_value=10**6)


def _count_forward(batch, heads, n_queries, n_keys, head_dim, visible):
    seen = sum(visible(query, key) for query in range(n_queries) for key in range(n_keys))
    return batch * heads * seen * (2 + 2) * head_dim  # q k^T and p v


@given(size, size, size, size, size)
def test_dense_forward_counts_every_multiply_add(batch, heads, n_queries, n_keys, head_dim):
    sizes = (batch, heads, n_queries, n_keys, head_dim)
    expected = _count_forward(*sizes, visible=lambda query, key: True)
    assert attention_flops(*sizes, False, "forward") == expected


@given(size, st.integers(min_value=1, max_value=20), size)
def test_causal_is_half_and_below_the_exact_count_by_the_diagonal(heads, n, head_dim):
    exact = _count_forward(1, heads, n, n, head_dim, visible=lambda query, key: key <= query)
    counted = attention_flops(1, heads, n, n, head_dim, True, "forward")
    assert 2 * counted == attention_flops(1, heads, n, n, head_dim, False, "forward")
    assert exact - counted == 2 * heads * n * head_dim


@given(large, large, large, large, large, st.booleans())
def test_passes_keep_their_ratios_exactly(batch, heads, n_queries, n_keys, head_dim, causal):
    sizes = (batch, heads, n_queries, n_keys, head_dim, causal)
    forward, backward, end_to_end = (attention_flops(*sizes, pass_) for pass_ in PASSES)
    assert all(type(count) is int for count in (forward, backward, end_to_end))
    assert 2 * backward == 5 * forward
    assert end_to_end == forward + backward


@given(size, size, size, size, size, st.sampled_from([1, 2, 4]))
def test_bytes_are_those_of_the_tensors_each_moved_once(b, h, n_queries, n_keys, d, element):
    shapes = {name: (b, h, n_queries, d) for name in ("q", "o", "do", "dq")}
    shapes |= {name: (b, h, n_keys, d) for name in ("k", "v", "dk", "dv")}
    nbytes = {n: x[0] * x[1] * x[2] * x[3] * element for n, x in shapes.items()}
    nbytes["lse"] = b * h * n_queries * 4
    moved = {
        "forward": ["q", "k", "v", "o", "lse"],
        "backward": ["q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"],
    }
    moved["end_to_end"] = moved["forward"] + moved["backward"]
    for pass_ in PASSES:
        expected = sum(nbytes[name] for name in moved[pass_])
        assert attention_bytes(b, h, n_queries, n_keys, d, element, pass_) == expected


@pytest.mark.parametrize("position, wrong", [(0, 0), (1, -1), (2, 1.0), (3, True), (4, None)])
def test_sizes_and_passes_that_cannot_be(position, wrong):
    sizes = [1, 2, 8, 8, 16]
    for call, more in ((attention_flops, False), (attention_bytes, 2)):
        refused("allowed are forward, backward, end_to_end", call, *sizes, more, "fwd")
        off = [*sizes[:position], wrong, *sizes[position + 1 :]]
        refused("allowed are positive integers", call, *off, more, "forward")

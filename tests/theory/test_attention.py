"""Operations, bytes, traffic and memory of attention, tiled and eager, against counts."""

from hypothesis import given
from hypothesis import strategies as st

from a2lib.theory.attention import PASSES, attention_bytes, attention_flops

size = st.integers(min_value=1, max_value=7)


@given(size, size, size, size, size)
def test_dense_forward_counts_every_multiply_add(batch, heads, n_queries, n_keys, head_dim):
    pairs = batch * heads * n_queries * n_keys
    counted = attention_flops(batch, heads, n_queries, n_keys, head_dim, False, "forward")
    assert counted == pairs * (2 + 2) * head_dim  # q k^T and p v


@given(size, st.integers(min_value=1, max_value=20), size)
def test_causal_is_half_and_below_the_exact_count_by_the_diagonal(heads, n, head_dim):
    seen = sum(key <= query for query in range(n) for key in range(n))
    counted = attention_flops(1, heads, n, n, head_dim, True, "forward")
    assert 2 * counted == attention_flops(1, heads, n, n, head_dim, False, "forward")
    assert heads * seen * (2 + 2) * head_dim - counted == 2 * heads * n * head_dim


@given(size, size, size, size, size, st.sampled_from([1, 2, 4]))
def test_bytes_are_those_of_the_tensors_each_moved_once(b, h, n_queries, n_keys, d, element):
    query = b * h * n_queries * d * element  # bytes of q, o, do and dq each
    key = b * h * n_keys * d * element  # of k, v, dk and dv
    lse = b * h * n_queries * 4
    forward = 2 * query + 2 * key + lse
    moved = {"forward": forward, "backward": forward + 2 * query + 2 * key}
    moved["end_to_end"] = moved["forward"] + moved["backward"]
    for pass_ in PASSES:
        assert attention_bytes(b, h, n_queries, n_keys, d, element, pass_) == moved[pass_]

"""Operations and bytes of attention, by hand."""

from a2lib.theory.attention import attention_bytes, attention_flops


def test_operations_are_two_per_multiply_add():
    sizes = 3, 2, 5, 7, 4  # batch, heads, queries, keys, head size
    pairs = 3 * 2 * 5 * 7
    assert attention_flops(*sizes, False, "forward") == pairs * (2 + 2) * 4  # q k^T and p v
    assert attention_flops(*sizes, False, "backward") == pairs * 5 * 2 * 4
    assert attention_flops(*sizes, False, "end_to_end") == pairs * 7 * 2 * 4


def test_causal_is_half_which_leaves_out_half_of_the_diagonal():
    heads, n, head_dim = 2, 6, 4
    counted = attention_flops(1, heads, n, n, head_dim, True, "forward")
    seen = n * (n + 1) // 2
    assert heads * seen * (2 + 2) * head_dim - counted == 2 * heads * n * head_dim


def test_bytes_are_those_of_the_tensors_each_moved_once():
    query, key = 3 * 2 * 5 * 4 * 2, 3 * 2 * 7 * 4 * 2  # bytes of q, o, do, dq; of k, v, dk, dv
    lse = 3 * 2 * 5 * 4
    forward, backward = 2 * query + 2 * key + lse, 4 * query + 4 * key + lse
    sizes = 3, 2, 5, 7, 4, 2
    assert attention_bytes(*sizes, "forward") == forward
    assert attention_bytes(*sizes, "backward") == backward
    assert attention_bytes(*sizes, "end_to_end") == forward + backward

"""Operations, bytes, traffic and memory of attention, tiled and eager, against counts."""

from hypothesis import given
from hypothesis import strategies as st

from a2lib.shapes import SIZES
from a2lib.theory import attention
from a2lib.theory.attention import PASSES, attention_bytes, attention_flops

size = st.integers(min_value=1, max_value=7)
length = st.integers(min_value=1, max_value=40)
large = st.integers(min_value=1, max_value=10**6)


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


def test_two_terms_are_smaller_and_want_heads_beyond_64_and_256_tokens():
    cells = {(256, 256, 65): True, (255, 4096, 128): False, (4096, 255, 128): False,
             (256, 4096, 64): False}  # fmt: skip
    assert {cell: attention.in_two_terms(*cell, 4) for cell in cells} == cells
    assert not attention.in_two_terms(4096, 4096, 128, 2)
    # Two fp16 numbers an element, of rows up to a multiple of 128, and an exponent a block.
    assert attention.terms_shape(300, 80) == attention.terms_shape(300, 75) == (384 + 1, 160)
    assert attention.terms_shape(1024, 80) == (1024 + 1, 160)


def test_one_sweep_where_programs_fill_the_gpu_or_rows_are_long():
    cells = {(1024, 1): True, (1023, 1): False, (1023, 32): False, (1023, 33): True,
             (512, 66): True, (512, 65): False, (128, 264): True, (127, 1000): False}  # fmt: skip
    assert {cell: attention.in_one_sweep(*cell, 64, 2) for cell in cells} == cells
    sizes = [d for d in range(1, 200) if attention.in_one_sweep(2048, 1, d, 2)]
    assert sizes == list(range(40, 129, 8)) and not attention.in_one_sweep(2048, 1, 64, 4)


def test_chunks_where_programs_of_128_keys_leave_a_gpu_idle():
    most = {(16, False): 128, (32, False): 128, (36, True): 64, (64, False): 64, (68, True): 64,
            (128, False): 32}  # fmt: skip
    for (head_dim, causal), n in most.items():
        cells = {(256, 1): True, (255, 1): False, (128 * n, 1): True, (128 * n + 1, 1): False,
                 (256, n // 2): True, (256, n // 2 + 1): False}  # fmt: skip
        assert {cell: attention.in_chunks(*cell, head_dim, causal, 2) for cell in cells} == cells


def test_chunks_in_fp32_where_rows_are_long_too():
    cells = {(255, 1): False, (256, 64): True, (256, 65): False, (4095, 4): True, (4095, 5): False,
             (4096, 5): True, (65536, 1): True}  # fmt: skip
    assert {cell: attention.in_chunks(*cell, 64, False, 4) for cell in cells} == cells
    assert not attention.in_chunks(2048, 1, 65, True, 4)


def test_long_causal_rows_are_cut_where_their_programs_fill_the_gpu_once():
    cut = {(64, 16384, 1): True, (64, 16384, 2): False, (64, 32768, 1): False, (64, 8192, 2): True,
           (64, 4096, 2): True, (64, 4096, 3): False, (128, 4096, 4): True, (128, 4096, 5): False,
           (128, 2048, 4): True, (128, 2048, 5): False, (32, 16384, 1): True, (32, 8192, 3): False,
           (32, 32768, 1): True, (16, 32769, 1): False}  # fmt: skip
    found = {(d, n, heads): attention.in_chunks(n, heads, d, True, 2) for d, n, heads in cut}
    assert found == cut


def test_few_tokens_are_one_launch_where_each_program_has_a_multiprocessor():
    one = {(128, 128, 1, 64): True, (129, 1, 1, 64): False, (1, 129, 1, 32): True,
           (256, 256, 16, 16): True, (256, 256, 17, 16): False, (257, 1, 1, 16): False,
           (128, 128, 33, 64): True, (128, 128, 34, 64): False, (1, 1, 66, 65): True,
           (256, 256, 4, 128): True, (256, 256, 5, 128): False,
           (257, 1, 1, 128): False}  # fmt: skip
    assert {cell: attention.in_one_launch(*cell, 2) for cell in one} == one
    assert not attention.in_one_launch(128, 128, 1, 64, 4)


tokens = st.integers(0, 2**17)


@given(
    tokens, tokens, st.integers(0, 64), st.booleans(), st.sampled_from([2, 4]), st.integers(0, 160)
)
def test_chunks_are_whole_tiles_and_few(n_queries, n_keys, n_heads, causal, width, multiprocessors):
    shape = n_queries, n_keys, n_heads, causal
    keys = attention.keys_per_chunk(*shape, width, multiprocessors)
    assert keys % 128 == 0
    if keys:
        assert 2 <= attention.n_chunks_of(keys, n_queries, n_keys, causal) <= attention.CHUNKS_MAX
        assert -(-n_queries // 64) * n_heads <= 2 * multiprocessors


def test_chunks_where_one_head_leaves_the_gpu_idle():
    def rows(heads, causal):
        lengths = (256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
        return [n for n in lengths if attention.keys_per_chunk(n, n, heads, causal, 2)]

    assert rows(1, True) == [512, 1024, 2048, 4096, 8192, 16384]
    assert rows(1, False) == [512, 1024, 2048, 4096]
    keys = [attention.keys_per_chunk(n, n, 1, True, 2) for n in rows(1, True)]
    assert keys == [128, 128, 256, 512, 2048, 4096]
    assert rows(16, True) == rows(16, False) == []


def test_no_training_step_has_chunks():
    """Hence the count of a step's tensors knows none."""
    for shape in SIZES.values():
        for n in range(64, 2**14 + 1, 64):
            for batch, width in ((1, 2), (1, 4), (4, 2), (4, 4)):
                heads = batch * shape.num_heads
                assert not attention.keys_per_chunk(n, n, heads, True, width), (shape, n, width)

"""The table of dispatch: which form and which tile a call has, and the limits between them."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from attention_standins import call
from hypothesis import given
from hypothesis import strategies as st

from a2lib.attention import dispatch
from a2lib.attention.dispatch import Call, backward_form, forward_form
from a2lib.shapes import SIZES


def test_the_table_needs_no_torch():
    """Read by its path: its package imports torch."""
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("dispatch", sys.argv[1])
module = sys.modules["dispatch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert not {"torch", "triton"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, dispatch.__file__], check=True, timeout=60)


FORMS = {
    ("bf16", 1, 512, 64): ("key_chunks", "query_chunks"),
    ("bf16", 1, 16384, 64): ("key_chunks", "hopper_chunks"),
    ("bf16", 16, 16384, 64): ("hopper", "one_sweep"),
    ("fp16", 16, 1024, 128): ("hopper", "one_sweep"),
    ("bf16", 4, 128, 64): ("plain", "one_launch"),
    ("bf16", 64, 64, 32): ("plain", "one_launch"),
    ("bf16", 64, 512, 32): ("plain", "two_sweeps"),
    ("fp32", 8, 2048, 64): ("plain", "query_chunks"),
    ("fp32", 16, 2048, 128): ("plain", "two_terms"),
    ("fp32", 256, 512, 64): ("plain", "two_sweeps"),
}


@pytest.mark.parametrize("cell", FORMS, ids=str)
def test_forms(cell):
    one = call(*cell)
    assert (forward_form(one), backward_form(one)) == FORMS[cell]


def test_forms_of_what_is_asked_and_of_another_gpu():
    long, few = call(n=16384), call(heads=1, n=512)
    assert forward_form(long._replace(hopper=False)) == "plain"
    assert backward_form(long._replace(hopper=False)) == "two_sweeps"
    assert backward_form(long._replace(fixed_order=True)) == "one_sweep"
    assert backward_form(few._replace(fixed_order=True)) == "two_sweeps"
    assert backward_form(call("fp32", d=128)._replace(fixed_order=True)) == "two_sweeps"
    assert forward_form(few._replace(multiprocessors=0)) == "plain", "on a CPU"
    assert backward_form(few) == backward_form(few._replace(n_queries=1)) == "query_chunks"
    assert backward_form(few._replace(n_queries=0)) == "two_sweeps", "with no sums to add up"


HEADS = {16: 0, 32: 0, 36: 0, 40: 1, 64: 1, 68: 0, 80: 1, 128: 1}


@pytest.mark.parametrize("dtype, heads", [("bf16", HEADS), ("fp16", {64: 1}), ("fp32", {64: 0})])
def test_hopper_runs_heads_of_40_to_128_in_steps_of_8_and_of_16_bits(dtype, heads):
    for d, yes in heads.items():
        one = call(dtype, n=4096, d=d)
        found = forward_form(one) == "hopper", backward_form(one) == "one_sweep"
        assert found == (yes, yes), d


def test_few_programs_of_grouped_keys_are_plain_tritons_backward():
    few, many = call(kv_heads=8), call(kv_heads=16, heads=32)
    assert (backward_form(few), backward_form(many)) == ("two_sweeps", "one_sweep")
    short = call(kv_heads=66, heads=132, n=256)
    assert backward_form(short) == "two_sweeps", "heads of keys fill the GPU, not of queries"


def test_long_rows_of_few_heads_are_cut_in_eight():
    def queries(d, n, **options):
        return dispatch.chunk_queries_of(call(heads=1, n=n, d=d)._replace(**options))

    cut = {(64, 8191): 0, (64, 8192): 1024, (64, 16384): 2048, (80, 4095): 0, (128, 4096): 512,
           (128, 8193): 1152, (128, 16384): 2048, (32, 16384): 0, (68, 8192): 0}  # fmt: skip
    assert {cell: queries(*cell) for cell in cut} == cut
    assert queries(64, 8192, n_queries=100) == 512
    assert queries(64, 8192, dtype="fp32") == queries(64, 8192, hopper=False) == 0


def test_every_kernel_is_one_and_every_form_and_row_has_its_kernels():
    for module, function in dispatch.KERNELS.values():
        source = Path(dispatch.__file__).with_name(f"{module}.py")
        assert f"def {function}(" in source.read_text(encoding="utf-8")
    assert {row.kernel for row in dispatch.ROWS} <= set(dispatch.KERNELS)
    for key, rows in dispatch.TILES.items():
        conditions = [row.when for row in rows]
        assert conditions[-1] == "always" and conditions.count("always") == 1, key


def tile(kernel, one, programs, keys=0):
    return dispatch.tiles_of(kernel, one, programs, keys)[0]


def test_another_tile_where_it_fills_the_gpu_or_rows_are_short_or_chunks_long():
    assert tile("forward", call(), lambda tile: 131) == (64, 128, 4, 3)
    assert tile("forward", call(), lambda tile: 132) == (64, 64, 4, 3)
    for n, programs, tokens in ((256, 132, 16), (256, 133, 64), (257, 1, 64)):
        assert tile("forward", call(n=n, d=128), lambda tile, n=programs: n).Bq == tokens
    for keys, sides in ((1023, (64, 64)), (1024, (64, 128)), (4096, (128, 64))):
        assert tile("forward_chunk", call(), lambda tile: 1, keys)[:2] == sides


def test_smaller_tiles_come_last():
    tiles = dispatch.tiles_of("backward_dq", call(d=128), lambda tile: 1000)
    assert tiles == ((128, 64, 8, 3), *dispatch.SMALLER)


def holds(rule, cells, *fields, **others):
    """Assert of which cells the rule holds; their numbers are those of the fields."""
    found = {}
    for cell in cells:
        numbers = cell if isinstance(cell, tuple) else (cell,)
        one = call(**others)._replace(**dict(zip(fields, numbers, strict=True)))
        found[cell] = bool(rule(one._replace(kv_heads=one.heads)))
    assert found == cells


def test_two_terms_are_smaller_and_want_heads_beyond_64_and_256_tokens():
    cells = {(256, 256, 65): True, (255, 4096, 128): False, (4096, 255, 128): False,
             (256, 4096, 64): False}  # fmt: skip
    holds(dispatch.in_two_terms, cells, "n_queries", "n_keys", "head_dim", dtype="fp32")
    assert not dispatch.in_two_terms(call(n=4096, d=128))
    # Two fp16 numbers an element, of rows up to a multiple of 128, and an exponent a block.
    assert dispatch.terms_shape(300, 80) == dispatch.terms_shape(300, 75) == (384 + 1, 160)
    assert dispatch.terms_shape(1024, 80) == (1024 + 1, 160)


def test_one_sweep_where_programs_fill_the_gpu_or_rows_are_long():
    cells = {(1024, 1): True, (1023, 1): False, (1023, 32): False, (1023, 33): True,
             (512, 66): True, (512, 65): False, (128, 264): True, (127, 1000): False}  # fmt: skip
    holds(dispatch.in_one_sweep, cells, "n_keys", "heads")
    sizes = {d: d in range(40, 129, 8) for d in range(1, 200)}
    holds(dispatch.in_one_sweep, sizes, "head_dim", n=2048)
    assert not dispatch.in_one_sweep(call("fp32", n=2048))
    assert (dispatch.GROUPED_PROGRAMS, dispatch.ORDERED_PROGRAMS) == (128, 264)


@pytest.mark.parametrize("head_dim, causal, most", [
    (16, False, 128), (32, False, 128), (36, True, 64), (64, False, 64), (68, True, 64),
    (128, False, 32),
])  # fmt: skip
def test_chunks_where_programs_of_128_keys_leave_a_gpu_idle(head_dim, causal, most):
    cells = {(256, 1): True, (255, 1): False, (128 * most, 1): True, (128 * most + 1, 1): False,
             (256, most // 2): True, (256, most // 2 + 1): False}  # fmt: skip
    holds(dispatch.in_chunks, cells, "n_keys", "heads", d=head_dim, causal=causal)


def test_chunks_in_fp32_where_rows_are_long_too():
    cells = {(255, 1): False, (256, 64): True, (256, 65): False, (4095, 4): True, (4095, 5): False,
             (4096, 5): True, (65536, 1): True}  # fmt: skip
    holds(dispatch.in_chunks, cells, "n_keys", "heads", dtype="fp32", causal=False)
    assert not dispatch.in_chunks(call("fp32", heads=1, n=2048, d=65))


def test_long_causal_rows_are_cut_where_their_programs_fill_the_gpu_once():
    cut = {(64, 16384, 1): True, (64, 16384, 2): False, (64, 32768, 1): False, (64, 8192, 2): True,
           (64, 4096, 2): True, (64, 4096, 3): False, (128, 4096, 4): True, (128, 4096, 5): False,
           (128, 2048, 4): True, (128, 2048, 5): False, (32, 16384, 1): True, (32, 8192, 3): False,
           (32, 32768, 1): True, (16, 32769, 1): False}  # fmt: skip
    holds(dispatch.in_chunks, cut, "head_dim", "n_keys", "heads")


def test_few_tokens_are_one_launch_where_each_program_has_a_multiprocessor():
    one = {(128, 128, 1, 64): True, (129, 1, 1, 64): False, (1, 129, 1, 32): True,
           (256, 256, 16, 16): True, (256, 256, 17, 16): False, (257, 1, 1, 16): False,
           (128, 128, 33, 64): True, (128, 128, 34, 64): False, (1, 1, 66, 65): True,
           (256, 256, 4, 128): True, (256, 256, 5, 128): False,
           (257, 1, 1, 128): False}  # fmt: skip
    holds(dispatch.in_one_launch, one, "n_queries", "n_keys", "heads", "head_dim")
    assert not dispatch.in_one_launch(call("fp32", heads=1, n=128))


tokens, heads = st.integers(0, 2**17), st.integers(0, 64)
dtypes = st.sampled_from(["bf16", "fp32"])


@given(tokens, tokens, heads, st.booleans(), dtypes, st.integers(0, 160))
def test_chunks_are_whole_tiles_and_few(n_queries, n_keys, heads, causal, dtype, many):
    one = Call(dtype, 1, heads, heads, n_queries, n_keys, 64, causal, many)
    keys = dispatch.keys_per_chunk(one)
    assert keys % 128 == 0
    if keys:
        assert 2 <= dispatch.n_chunks_of(keys, one) <= dispatch.CHUNKS_MAX
        assert -(-n_queries // 64) * heads <= 2 * many


@pytest.mark.parametrize("heads, causal, rows", [
    (1, True, {512: 128, 1024: 128, 2048: 256, 4096: 512, 8192: 2048, 16384: 4096}),
    (1, False, {512: 128, 1024: 128, 2048: 256, 4096: 512}),
    (16, True, {}), (16, False, {}),
])  # fmt: skip
def test_chunks_where_one_head_leaves_the_gpu_idle(heads, causal, rows):
    """By length, the keys of a chunk."""
    lengths = (256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
    for n in lengths:
        found = dispatch.keys_per_chunk(call(heads=heads, n=n, causal=causal))
        assert found == rows.get(n, 0), n


def test_no_training_step_has_chunks():
    """Hence the count of a step's tensors knows none."""
    lengths, batches = range(64, 2**14 + 1, 64), (1, 4)
    for shape, n, dtype in itertools.product(SIZES.values(), lengths, ("bf16", "fp32")):
        for batch in batches:
            one = call(dtype, shape.num_heads, n, batch=batch)
            assert not dispatch.keys_per_chunk(one), (shape, n, dtype, batch)

"""The table of dispatch: which form and which tile a call has, and the limits between them."""

import itertools
from pathlib import Path

import pytest
from attention_standins import call
from hypothesis import given
from hypothesis import strategies as st

from a2lib.attention import dispatch, tiles
from a2lib.attention.dispatch import Call, backward_form, forward_form
from a2lib.shapes import SIZES

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


def test_grouped_keys_run_hopper_where_there_are_as_many_programs():
    assert backward_form(call(kv_heads=8)) == "two_sweeps"
    assert backward_form(call(kv_heads=16, heads=32)) == "one_sweep"


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


def test_every_kernel_is_one_and_every_form_and_row_has_its_kernels():
    for module, function in dispatch.KERNELS.values():
        source = Path(dispatch.__file__).with_name(f"{module}.py")
        assert f"def {function}(" in source.read_text(encoding="utf-8")
    assert {row.kernel for row in tiles.ROWS} <= set(dispatch.KERNELS)
    for key, rows in tiles.TILES.items():
        conditions = [row.when for row in rows]
        assert conditions[-1] == "always" and conditions.count("always") == 1, key


tokens, heads = st.integers(0, 2**17), st.integers(0, 64)
dtypes = st.sampled_from(["bf16", "fp32"])


@given(tokens, tokens, heads, st.booleans(), dtypes, st.integers(0, 160))
def test_chunks_are_whole_tiles_and_few(n_queries, n_keys, heads, causal, dtype, many):
    one = Call(dtype, 1, heads, heads, n_queries, n_keys, 64, causal, many)
    keys = dispatch.keys_per_chunk(one)
    assert keys % 128 == 0
    if keys:
        assert 2 <= dispatch.n_key_chunks(one) <= dispatch.KEY_CHUNKS_MAX
        assert -(-n_queries // 64) * heads <= 2 * many


def test_no_training_step_has_chunks():
    """Hence the count of a step's tensors knows none."""
    lengths, batches = range(64, 2**14 + 1, 64), (1, 4)
    for shape, n, dtype in itertools.product(SIZES.values(), lengths, ("bf16", "fp32")):
        for batch in batches:
            one = call(dtype, shape.num_heads, n, batch=batch)
            assert not dispatch.keys_per_chunk(one), (shape, n, dtype, batch)

"""Operations, bytes, traffic and memory of attention, tiled and eager, against counts."""

import pytest
import torch
from attention_standins import log_launches
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from a2lib.attention import dispatch, passes
from a2lib.theory import attention
from a2lib.theory.attention import PASSES, attention_bytes, attention_flops, tiled_memory
from a2lib.theory.transformer import SIZES

size = st.integers(min_value=1, max_value=7)
length = st.integers(min_value=1, max_value=40)
large = st.integers(min_value=1, max_value=10**6)
tile = st.sampled_from([1, 4, 8, 16])


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


def walk(kernel, n_queries, n_keys, d, causal, width, Bq, Bk):
    """One head's bytes through L2, program by program."""
    queries = [range(i, min(i + Bq, n_queries)) for i in range(0, n_queries, Bq)]
    keys = [range(j, min(j + Bk, n_keys)) for j in range(0, n_keys, Bk)]
    owners, streams, owned, streamed = (queries, keys, Bq, Bk)
    if kernel == "backward":
        owners, streams, owned, streamed = (keys, queries, Bk, Bq)
    moved = 0
    for owner in owners:
        # q, o; k, v, dk, dv
        moved += {"forward": 2, "backward": 4}[kernel] * owned * d * width
        for stream in streams:
            rows, columns = (owner, stream) if owners is queries else (stream, owner)
            if causal and columns[0] > rows[-1] and Bq * (rows[0] // Bq) + Bq - 1 < columns[0]:
                continue
            moved += 2 * streamed * d * width  # k and v, or q and do
            if kernel == "backward":
                moved += streamed * (2 + d) * 4  # lse and delta; dq
    return moved


@given(st.sampled_from(sorted(attention.KERNELS)), length, length, st.booleans(), tile, tile)
def test_traffic_counts_every_tile(kernel, n_queries, n_keys, causal, Bq, Bk):
    found = attention.tiled_l2_bytes(kernel, 2, 3, n_queries, n_keys, 8, causal, 2, Bq, Bk)
    assert found == 6 * walk(kernel, n_queries, n_keys, 8, causal, 2, Bq, Bk)


def test_one_sweep_is_what_the_pass_allocates():
    for d in (40, 72):
        q = torch.empty(2, 3, 200, d)
        made = dict(zip(("rows", "sums"), passes.scratch(q, is_permuted=d > 64), strict=True))
        more = {"one_sweep": True, "whole_tiles": d > 64}
        held = tiled_memory(2, 3, 200, 200, d, 2, "backward", **more)
        assert {name: x.nbytes for name, x in made.items()} == {n: held[n] for n in made}
    chunks = {"query_chunks": True}
    held = [tiled_memory(2, 3, 200, 9, 72, 2, "backward", whole_tiles=x, **chunks) for x in (0, 1)]
    assert [x["dq_sums"] for x in held] == [4 * 6 * 200 * 72, 4 * 6 * 256 * 128]


@pytest.mark.parametrize("d, n", [(40, 200), (80, 255), (80, 257), (128, 256)])
def test_the_terms_of_fp32_are_what_a_pass_allocates(monkeypatch, d, n):
    log = log_launches(monkeypatch)
    monkeypatch.setattr(passes, "INTERPRETED", True)
    q, (k, v) = torch.empty(2, 3, n, d), torch.empty(2, 2, 3, 1024, d)
    found = []
    o, lse = passes.forward(q, k, v, True, None)
    found.append(terms_of(log, ("k", "v")))
    passes.backward(o, q, k, v, o, lse, True, None, (True, True, True))
    found.append(terms_of(log, ("k", "v", "q", "do")))
    terms = {"bf16x6": 3, "fp16x3": 2}[passes.case_of((q, k), True).precision]
    for made, pass_ in zip(found, ("forward", "backward"), strict=True):
        held = tiled_memory(2, 3, n, 1024, d, 4, pass_, terms=terms)
        assert made == {name: held[name] for name in held if name.endswith("_terms")}


def terms_of(log, names):
    """Bytes of the terms that were split, by name."""
    made = [x for launch in log if launch.name.startswith("split") for x in launch.args[2:4]]
    log.clear()
    return {f"{name}_terms": x.nbytes for name, x in zip(names, made, strict=True)}


def test_two_terms_are_blocks_of_rows_with_an_exponent_each():
    held = tiled_memory(2, 3, 300, 1024, 80, 4, "backward", terms=2)
    assert held["q_terms"] == held["do_terms"] == 6 * (384 + 1) * 160 * 2
    assert held["k_terms"] == held["v_terms"] == 6 * (1024 + 1) * 160 * 2
    assert tiled_memory(2, 3, 300, 1024, 75, 4, "backward", terms=2)["q_terms"] == 739_200


def test_parts_of_chunks_go_before_the_backward():
    forward = tiled_memory(1, 1, 2048, 2048, 64, 2, "forward", key_chunks=8)
    assert forward["parts"] == 8 * 2048 * 64 * 4 and forward["part_lse"] == 8 * 2048 * 4
    sizes = 1, 1, 2048, 2048, 64, 2
    assert tiled_memory(*sizes, "end_to_end", key_chunks=8) == forward
    # Where the backward holds more, the parts do not count.
    few = tiled_memory(*sizes, "end_to_end", one_sweep=True, key_chunks=1)
    assert few == tiled_memory(*sizes, "end_to_end", one_sweep=True)
    assert tiled_memory(*sizes, "backward", key_chunks=8) == tiled_memory(*sizes, "backward")


def test_no_training_step_has_chunks():
    """Hence the count of a step's tensors knows none."""
    for shape in SIZES.values():
        for n in range(64, 2**14 + 1, 64):
            for batch, dtype in ((1, "bf16"), (1, "fp32"), (4, "bf16"), (4, "fp32")):
                heads, d = shape.num_heads, shape.d_model // shape.num_heads
                case = dispatch.Case(dtype, batch, heads, heads, n, n, d, True, dispatch.HOPPER)
                assert not dispatch.keys_per_chunk(case), (shape, n, dtype)


@pytest.mark.parametrize("position, wrong", [(0, 0), (1, -1), (2, 1.0), (3, True), (4, None)])
def test_sizes_and_passes_that_cannot_be(position, wrong):
    sizes = [1, 2, 8, 8, 16]
    for call, more in ((attention_flops, False), (attention_bytes, 2)):
        refused("allowed are forward, backward, end_to_end", call, *sizes, more, "fwd")
        off = [*sizes[:position], wrong, *sizes[position + 1 :]]
        refused("allowed are positive integers", call, *off, more, "forward")


def test_impossible_sizes_are_refused():
    one = [1] * 5
    refused("allowed are forward", attention.tiled_l2_bytes, "sideways", *one, True, 2, 1, 1)
    refused("Bq is 0", attention.tiled_l2_bytes, "forward", *one, True, 2, 0, 1)
    refused("allowed are forward", tiled_memory, *one, 2, "sideways")

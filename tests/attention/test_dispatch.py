"""Which kernel and which tiles the table has for a pass, and what is launched for it."""

import math

import pytest
import torch
from attention_standins import log_launches, run
from hypothesis import example, given
from hypothesis import strategies as st
from refusals import refused

from a2lib.attention import dispatch, passes
from a2lib.attention.dispatch import HOPPER, Case, Gpu, Tile
from a2lib.errors import UnsupportedError

OTHER = Gpu(132)


def case(n_queries, n_keys=None, heads=1, head_dim=64, is_causal=True, dtype="bf16", **more):
    n_keys = n_queries if n_keys is None else n_keys
    sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "head_dim": head_dim}
    lengths = {"n_queries": n_queries, "n_keys": n_keys}
    return Case(dtype, **sizes, **lengths, is_causal=is_causal, **{"gpu": HOPPER, **more})


def tensors(length=40, heads=2, d=64, dtype=torch.bfloat16, batch=3):
    return [torch.zeros(batch, length, heads, d, dtype=dtype).transpose(1, 2) for _ in range(3)]


# The rules.


def test_one_sweep_where_programs_fill_the_gpu_or_rows_are_long():
    cells = {(1024, 1): True, (1023, 1): False, (1023, 32): False, (1023, 33): True,
             (512, 66): True, (512, 65): False, (128, 264): True, (127, 1000): False}  # fmt: skip
    assert {cell: dispatch.is_one_sweep(case(cell[0], heads=cell[1])) for cell in cells} == cells
    sizes = [d for d in range(1, 129) if dispatch.is_one_sweep(case(2048, head_dim=d))]
    assert sizes == list(range(40, 129, 8))
    for more in ({"dtype": "fp32"}, {"gpu": OTHER}, {"is_addressable": False}):
        assert not dispatch.is_one_sweep(case(2048, **more))
    assert not dispatch.is_one_sweep(case(2048, wants_all=False))


def test_grouped_keys_and_a_fixed_order_are_one_sweep_of_many_programs():
    grouped = {heads: case(4096, heads=4 * heads)._replace(kv_heads=heads) for heads in (3, 4)}
    assert [dispatch.is_one_sweep(x) for x in grouped.values()] == [False, True]
    assert not dispatch.is_one_sweep(grouped[4]._replace(is_deterministic=True))
    for heads, wanted in ((8, False), (9, True)):
        ordered = case(4096, heads=heads, is_deterministic=True)
        assert dispatch.is_one_sweep(ordered) == wanted


def test_chunks_where_programs_of_128_keys_leave_a_gpu_idle():
    most = {(16, False): 128, (32, False): 128, (36, True): 64, (64, False): 64, (68, True): 64,
            (128, False): 32}  # fmt: skip
    for (d, is_causal), n in most.items():
        cells = {(256, 1): True, (255, 1): False, (128 * n, 1): True, (128 * n + 1, 1): False,
                 (256, n // 2): True, (256, n // 2 + 1): False}  # fmt: skip
        found = {
            (length, heads): dispatch.shares_queries(case(length, None, heads, d, is_causal))
            for length, heads in cells
        }
        assert found == cells


def test_chunks_in_fp32_where_rows_are_long_too():
    cells = {(255, 1): False, (256, 64): True, (256, 65): False, (4095, 4): True, (4095, 5): False,
             (4096, 5): True, (65536, 1): True}  # fmt: skip
    for (length, heads), wanted in cells.items():
        fp32 = case(length, None, heads, is_causal=False, dtype="fp32")
        assert dispatch.shares_queries(fp32) == wanted, (length, heads)
    assert not dispatch.shares_queries(case(2048, head_dim=65, dtype="fp32"))


def test_long_causal_rows_are_cut_where_their_programs_fill_the_gpu_once():
    cut = {(64, 16384, 1): True, (64, 16384, 2): False, (64, 32768, 1): False, (64, 8192, 2): True,
           (64, 4096, 2): True, (64, 4096, 3): False, (128, 4096, 4): True, (128, 4096, 5): False,
           (128, 2048, 4): True, (128, 2048, 5): False, (32, 16384, 1): True, (32, 8192, 3): False,
           (32, 32768, 1): True, (16, 32769, 1): False}  # fmt: skip
    for (d, n, heads), wanted in cut.items():
        assert dispatch.shares_queries(case(n, None, heads, d)) == wanted, (d, n, heads)


def test_few_tokens_are_one_launch_where_each_program_has_a_multiprocessor():
    cells = {(128, 128, 1, 64): True, (129, 1, 1, 64): False, (1, 129, 1, 32): True,
             (256, 256, 16, 16): True, (256, 256, 17, 16): False, (257, 1, 1, 16): False,
             (128, 128, 33, 64): True, (128, 128, 34, 64): False, (1, 1, 66, 65): True,
             (256, 256, 4, 128): True, (256, 256, 5, 128): False,
             (257, 1, 1, 128): False}  # fmt: skip
    assert {cell: dispatch.fits_one_launch(case(*cell)) for cell in cells} == cells
    assert not dispatch.fits_one_launch(case(128, dtype="fp32"))


def test_two_terms_want_heads_beyond_64_and_256_tokens():
    cells = {(256, 256, 65): True, (255, 4096, 128): False, (4096, 255, 128): False,
             (256, 4096, 64): False}  # fmt: skip
    for (n_queries, n_keys, d), wanted in cells.items():
        fp32 = case(n_queries, n_keys, head_dim=d, dtype="fp32")
        assert (fp32.precision == "fp16x3") == wanted
        assert fp32._replace(allows_tf32=True).precision == "tf32"
        assert fp32._replace(is_deterministic=True).precision == "bf16x6"
    assert case(4096, head_dim=128).precision == "ieee"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_some_gradients_alone_are_two_sweeps_but_of_two_terms(dtype, is_deterministic):
    for length, d in ((128, 64), (1024, 64), (4096, 128)):
        some = case(length, head_dim=d, dtype=dtype, wants_all=False)
        some = some._replace(is_deterministic=is_deterministic)
        two = some.precision == "fp16x3"
        assert dispatch.backward_form(some) == ("two_terms" if two else "two_sweeps")


tokens = st.integers(0, 2**17)
dtypes = st.sampled_from(["bf16", "fp32"])


@given(tokens, tokens, st.integers(0, 64), st.booleans(), dtypes, st.integers(0, 160))
def test_chunks_of_keys_are_whole_tiles_and_few(n_queries, n_keys, heads, is_causal, dtype, many):
    some = case(n_queries, n_keys, heads, is_causal=is_causal, dtype=dtype, gpu=Gpu(many))
    keys = dispatch.keys_per_chunk(some)
    assert keys % 128 == 0
    if keys:
        assert 2 <= dispatch.n_key_chunks(some) <= dispatch.KEY_CHUNKS_MAX
        assert -(-n_queries // 64) * heads <= 2 * many


def test_chunks_of_keys_where_one_head_leaves_the_gpu_idle():
    def rows(heads, is_causal):
        lengths = (256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
        found = {n: dispatch.keys_per_chunk(case(n, None, heads, 64, is_causal)) for n in lengths}
        return {n: keys for n, keys in found.items() if keys}

    causal = {512: 128, 1024: 128, 2048: 256, 4096: 512, 8192: 2048, 16384: 4096}
    assert rows(1, True) == causal
    assert list(rows(1, False)) == [512, 1024, 2048, 4096]
    assert rows(16, True) == rows(16, False) == {}


def test_long_rows_of_few_heads_are_cut_in_eight():
    cut = {(64, 8191): 0, (64, 8192): 1024, (64, 16384): 2048, (80, 4095): 0, (128, 4096): 512,
           (128, 8193): 1152, (128, 16384): 2048, (32, 16384): 0, (68, 8192): 0}  # fmt: skip
    for (d, n), queries in cut.items():
        some = case(n, head_dim=d)
        is_cut = dispatch.backward_form(some) == "hopper_chunks"
        assert (dispatch.queries_per_gluon_chunk(some) if is_cut else 0) == queries, (d, n)
    few = case(100, 8192)
    assert dispatch.backward_form(few) == "hopper_chunks"
    assert dispatch.queries_per_gluon_chunk(few) == 512
    assert dispatch.backward_form(case(8192, gpu=OTHER)) == "chunks"
    assert dispatch.backward_form(case(8192, dtype="fp32")) == "chunks"


def test_gluon_forwards_are_of_heads_of_40_to_128_in_steps_of_8():
    for d, yes in {16: 0, 32: 0, 36: 0, 40: 1, 64: 1, 68: 0, 80: 1, 128: 1}.items():
        wanted = "hopper" if yes else "plain"
        assert dispatch.forward_form(case(1024, heads=16, head_dim=d)) == wanted, d
    for more in ({"dtype": "fp32"}, {"gpu": OTHER}, {"is_addressable": False}):
        assert dispatch.forward_form(case(4096, heads=16, **more)) == "plain"


@given(
    st.sampled_from(range(40, 129, 8)), st.integers(1, 2**17), st.integers(1, 2**10), st.booleans()
)
def test_only_forms_that_exist_and_are_compiled(d, n, heads, is_causal):
    some = case(n, None, heads, d, is_causal)
    consumers, stays = dispatch.hopper_consumers(some)
    assert consumers in ((0, 1, 3) if d <= 64 else (0, 1, 2))
    assert not stays or consumers in (1, 2), "with three consumers a program has one tile"
    also = dispatch.hopper_backward_stays(some)
    assert not (is_causal and heads % 2 and (stays or also)), "pairs are of two heads"


@pytest.mark.parametrize("n, heads, wanted", [(32768, 16, 4), (32768, 3, 3), (4096, 15, 10)])
def test_some_heads_run_together_however_long(n, heads, wanted):
    assert dispatch.hopper_backward(case(n, heads=heads)).heads_together == wanted


# Tiles.


@pytest.mark.parametrize("spare, few", [(1, True), (0, False), (-1, False)])
def test_small_tiles_where_the_first_would_leave_multiprocessors_idle(spare, few):
    found = dispatch.tiles("forward", case(64 * (10 - spare), gpu=Gpu(10)))
    assert found[0] == (Tile(64, 128, 4, 3) if few else Tile(64, 64, 4, 3))
    assert found[-1] == Tile(16, 16, 4, 1), "for a GPU of little shared memory"


@pytest.mark.parametrize("length, many, short", [(256, 16, 1), (256, 15, 0), (257, 99, 0)])
def test_tiles_of_short_rows_where_each_program_has_a_multiprocessor(length, many, short):
    (tile, *_) = dispatch.tiles("forward", case(length, head_dim=128, gpu=Gpu(many)))
    assert tile == (Tile(16, 128, 4, 1) if short else Tile(64, 64, 4, 3))


def test_tiles_of_rows_in_chunks():
    usual = Tile(64, 64, 8, 3)
    for length, heads, tile in (
        (512, 1, (64, 32, 4, 3)),  # 72 programs
        (512, 4, usual),  # would be 160
        (641, 1, usual),
        (2047, 1, usual),
        (2048, 1, (32, 64, 4, 3)),
    ):
        some = case(length, heads=heads, head_dim=128)
        assert dispatch.tiles("backward_chunks", some)[0] == tile, (length, heads)


def test_every_kernel_has_tiles_wherever_it_runs():
    for dtype in ("bf16", "fp16", "fp32"):
        for d in (1, 16, 17, 64, 65, 128):
            for is_causal in (True, False):
                for length in (100, 300, 2000, 20000):
                    some = case(length, None, 1, d, is_causal, dtype)
                    for kernel in _kernels(some):
                        assert dispatch.tiles(kernel, some), (kernel, some)


def _kernels(some):
    forward = {"plain": "forward", "key_chunks": "forward_chunk"}
    backward = {"one_launch": "backward", "two_terms": "backward_wide", "chunks": "backward_chunks",
                "two_sweeps": "backward_dq"}  # fmt: skip
    forms = forward.get(dispatch.forward_form(some)), backward.get(dispatch.backward_form(some))
    return [kernel for kernel in forms if kernel]


some_tile = st.sampled_from(
    [Tile(q, k, 4, 1) for q, k in ((64, 64), (64, 128), (32, 16), (16, 32))]
)
few_tokens, chunks = st.integers(1, 3000), st.none() | st.sampled_from([128, 384, 1152])


@given(
    some_tile,
    few_tokens,
    few_tokens,
    st.integers(1, 64),
    st.booleans(),
    st.integers(0, 132),
    chunks,
)
@example(Tile(64, 128, 8, 2), 16384, 16384, 1, True, 132, None)
def test_programs_are_the_chunks_that_see_something(
    tile, n_queries, n_keys, heads, is_causal, many, chunk
):
    some = case(n_queries, n_keys, heads, is_causal=is_causal, gpu=Gpu(many))
    chunk = chunk or dispatch.queries_per_chunk(tile, some)
    assert chunk % tile.Bq == chunk % tile.Bk == 0
    seen = sum(
        not is_causal or n0 // chunk <= m0 // chunk
        for n0 in range(0, n_keys, tile.Bk)
        for m0 in range(0, n_queries, chunk)
    )
    assert dispatch.chunk_programs(tile, chunk, some) == seen


# What is launched.


@pytest.fixture
def log(monkeypatch):
    return log_launches(monkeypatch, HOPPER)


def names_of(log):
    names = [launch.name for launch in log]
    log.clear()
    return names


def test_each_form_is_its_kernels(log):
    sweeps = ["backward_dq", "backward_dkdv"]
    run(*tensors(40))
    assert names_of(log) == ["forward", "backward"]
    run(*tensors(40), needs=(True, False, True))
    assert names_of(log) == ["forward", *sweeps]
    run(*tensors(40), needs=(True, False, False))
    assert names_of(log) == ["forward", "backward_dq"]
    run(*tensors(1024))
    chunks = ["prepare_chunks", "backward_chunks", "finish_chunks"]
    assert names_of(log) == ["hopper_forward", *chunks]
    run(*tensors(2048, heads=8))
    assert names_of(log) == ["hopper_forward", "prepare", "hopper_backward", "finish"]
    run(*tensors(8192, heads=1, batch=1))
    assert names_of(log) == ["forward_chunk", "combine", chunks[0], "hopper_backward", chunks[2]]
    run(*tensors(40, d=128, dtype=torch.float32))
    terms = ["split", "forward", "split", "split"]
    assert names_of(log) == [*terms, "backward_dq", "backward_dk", "backward_dv"]
    run(*tensors(300, heads=8, d=128, dtype=torch.float32))
    wide = ["prepare_chunks", "split_wide", "split_wide", "backward_wide", "finish_chunks"]
    assert names_of(log) == ["split_wide", "forward", *wide]
    run(*tensors(0))
    assert names_of(log) == []


def test_what_the_copy_engine_cannot_address_is_plain_tritons(log):
    q, k, v = tensors(1024)
    odd = torch.zeros(3, 2, 1024, 68, dtype=q.dtype)[..., :64]
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(3, 1024, 2, 64).transpose(1, 2)
    for wrong in (odd, shifted, q[:, :, :1].expand_as(q)):
        run(q, wrong, v)
        assert "hopper_forward" not in names_of(log)
    apart = torch.zeros(2**16, dtype=q.dtype).as_strided((1, 2, 128, 64), (3, 8192, 64, 1))
    assert passes._is_addressable(apart), "the stride of a dimension of one is nobody's"


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("length, d, one", [(128, 64, 1), (129, 64, 0), (256, 32, 1), (128, 65, 1)])
def test_few_tokens_are_one_launch_in_any_order(log, monkeypatch, fixed, length, d, one):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: fixed)
    q, k, v = tensors(length, d=d)
    run(q, k[:, :1], v[:, :1])
    launched = [(launch.name, launch.n_programs) for launch in log[1:]]
    rows = 64 if d <= 64 else 16
    assert launched == [("backward", length // rows * (6 + 3))] if one else len(launched) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "length, is_causal, early", [(4096, True, 1), (4097, True, 0), (512, False, 1), (513, False, 0)]
)
def test_kernels_of_short_chunks_are_launched_early(log, dtype, length, is_causal, early):
    run(*tensors(length, heads=1, batch=1, dtype=dtype), causal=is_causal)
    early &= dtype == torch.bfloat16
    chunks = {x.name: x.options["launch_pdl"] for x in log if x.name.endswith("chunks") and
              "launch_pdl" in x.options}  # fmt: skip
    assert chunks == {"prepare_chunks": 0, "backward_chunks": early, "finish_chunks": early}


def test_the_scale_reaches_the_kernel(log):
    for scale, wanted in ((None, 1 / math.sqrt(64)), (0.25, 0.25)):
        passes.forward(*tensors(), True, scale)
        assert wanted in [x for x in log.pop().args if isinstance(x, float)]


def test_what_cannot_run_is_refused(log):
    q, k, v = tensors()
    refused("same shape", passes.forward, q, k, v[:, :, :7], True, None)
    for wrong in ((None, k, v), (q, k, "v")):
        refused("tensors", passes.forward, *wrong, True, None, error=TypeError)
    for wrong, words in (
        ([x.double() for x in (q, k, v)], "runs bfloat16, float16, float32; got torch.float64"),
        (tensors(d=129), "runs head_dim 1 to 128; got 129"),
    ):
        refused(words, passes.forward, *wrong, True, None, error=UnsupportedError)


def test_a_gpu_with_too_little_shared_memory_takes_the_next_tile(monkeypatch, log):
    from triton.runtime.errors import OutOfResources

    tried = []

    class Small:
        def __getitem__(self, grid):
            def launch(*args, Bq, **options):
                tried.append(Bq)
                if Bq > 16:
                    raise OutOfResources(2**20, 2**16, "shared memory")

            return launch

    monkeypatch.setitem(passes.KERNELS, "forward", Small())
    passes.forward(*tensors(), True, None)
    assert tried == [64, 64, 64, 32, 16]
    monkeypatch.setattr(dispatch, "SMALLER", ())
    dispatch.tiles.cache_clear()
    refused("shared memory", passes.forward, *tensors(41), True, None, error=UnsupportedError)
    dispatch.tiles.cache_clear()


@pytest.mark.parametrize(
    "n_queries, d, mode, two",
    [(256, 128, None, True), (255, 128, None, False), (256, 65, None, True), (256, 64, None, False),
     (256, 128, "tf32", False), (256, 128, "fixed order", False)],
)  # fmt: skip
def test_both_passes_multiply_alike(log, monkeypatch, n_queries, d, mode, two):
    monkeypatch.setattr(
        torch, "are_deterministic_algorithms_enabled", lambda: mode == "fixed order"
    )
    monkeypatch.setattr(passes, "_allows_tf32", lambda: mode == "tf32")
    q, do = torch.empty(2, 1, 2, n_queries, d)
    k, v = torch.empty(2, 1, 1, 300, d)
    o, lse = passes.forward(q, k, v, True, None)
    want = set() if mode == "tf32" else {"split_wide" if two else "split"}
    assert {"split", "split_wide"} & set(names_of(log)) == want
    for needs in ((True, True, True), (True, False, False)):
        passes.backward(do, q, k, v, o, lse, True, None, needs)
        names = set(names_of(log))
        assert {"split", "split_wide"} & names == want and ("backward_wide" in names) == two


RUNGS_OF = {
    "every_tile": ("forward, True", "backward_dq, True"),
    "to_diagonal": ("forward, False", "backward_dq, False"),
    "two_loops": ("forward", "backward_dq"),
    "tuned_tiles": ("forward", "backward_dq"),
    "one_consumer": ("hopper_forward", "backward_dq"),
    "consumers": ("hopper_forward", "backward_dq"),
    "one_sweep": ("hopper_forward", "prepare"),
    "heads_in_l2": ("hopper_forward", "prepare"),
    "key_chunks": ("forward_chunk", "prepare"),
    "query_chunks": ("forward_chunk", "prepare_chunks"),
}


def test_a_rung_is_without_the_techniques_above_it(log):
    assert list(RUNGS_OF) == list(dispatch.RUNGS)
    for rung, wanted in RUNGS_OF.items():
        run(*tensors(4096, heads=1, batch=1), rung=rung)
        first, *rest = log
        later = next(x for x in rest if x.name != "combine")
        assert (first.name, later.name) == wanted, rung
        log.clear()
    board = case(16384, heads=16)
    below, whole = (
        dispatch.hopper_backward(board._replace(rung=x)) for x in ("one_sweep", "key_chunks")
    )
    assert (below.heads_together, whole.heads_together) == (16, 4)
    wide = board._replace(head_dim=128, is_causal=False)
    assert dispatch.hopper_consumers(wide)[0] == 2
    assert dispatch.hopper_consumers(wide._replace(rung="one_consumer")) == (1, False)
    tutorial, tuned = (
        dispatch.tiles("forward", board._replace(rung=x))[0] for x in ("two_loops", "tuned_tiles")
    )
    assert tutorial == dispatch.TUTORIAL["forward"] and tuned == Tile(64, 64, 4, 3)

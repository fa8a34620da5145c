"""What surrounds the Gluon kernels, without a GPU: when they run, on what, and what is done before
and after them. The kernels themselves run in tests/gpu/test_attention_hopper.py."""

import contextlib
import itertools
import math
from types import SimpleNamespace

import attention_compare as compare
import pytest
import torch
import torch.nn.functional as F
from attention_compare import errors, filled_with_nan, in_float64, laid_out, random_inputs
from attention_standins import call, run, stand_in
from hypothesis import example, given
from hypothesis import strategies as st

from a2lib.attention import dispatch, forms, hopper_backward, hopper_forward, launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")


def tensor(length=1024, heads=2, d=64, dtype=torch.bfloat16):
    """(3, heads, length, d), as a model's projections lie."""
    return torch.zeros(3, length, heads, d, dtype=dtype).transpose(1, 2)


def problem(q, k=None, v=None, do=None, causal=True, **options):
    """A backward over these; ``options`` are of its ``dispatch.Call``."""
    k, v, do = (x if y is None else y for x, y in zip((q, q, q), (k, v, do), strict=True))
    tensors = {"do": do, "q": q, "k": k, "v": v, "o": torch.empty_like(q)}
    tensors |= {"lse": torch.zeros(q.shape[:-1])}
    tensors |= {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    call = launches.call_of(tensors, causal)._replace(**options)
    return forms.Pass(tensors, call, 1 / math.sqrt(call.head_dim))


# What stands before and after the one-pass kernel.


def permuted(x):
    """Each tile of 64 by 64 as four warps store a product's sums: a thread has two neighbours of a
    row and of the eighth row after it, in every eight columns, and stores such four at a time."""
    ranges = map(torch.arange, (8, 4, 32, 2, 2))
    eight, warp, lane, lower, odd = torch.meshgrid(*ranges, indexing="ij")
    row, column = 16 * warp + 8 * lower + lane // 4, 8 * eight + 2 * (lane % 4) + odd
    tiles = x.unflatten(-1, (-1, 64)).unflatten(-3, (-1, 64)).transpose(-3, -2)
    return tiles[..., row, column].reshape(tiles.shape).transpose(-3, -2).reshape(x.shape)


def one_pass(step, tensors):
    """Run ``hopper_backward.backward_kernel`` in PyTorch."""
    q, do, k, v, sums, rows, dk, dv, turns = tensors
    scale, scale2 = step.numbers[:2]
    heads, n, d = q.shape[:2], q.shape[2], q.shape[3]
    group = heads[1] // k.shape[1]
    assert (rows[:, 0, n:] == math.inf).all() and (rows[:, 1, n:] == 0).all()
    q32, do32 = q.float(), do.float()
    k32, v32 = (x.float().repeat_interleave(group, 1) for x in (k, v))
    lse, delta = (rows[:, i, :n].reshape(*heads, n, 1) for i in (0, 1))
    p = torch.exp2(q32 @ k32.mT * scale2 - lse)
    p = p.tril() if step.constants["CAUSAL"] else p
    ds = p * (do32 @ v32.mT - delta)
    dq = (ds @ k32).flatten(0, 1)
    if d > 64:  # whole tiles: what is past the last query or column is nobody's
        dq = permuted(F.pad(dq, (0, 128 - d, 0, sums.shape[1] - n), value=math.nan))
    if step.constants["ORDERED"]:
        assert (turns == 0).all() and sums.isnan().all()
        sums.zero_()  # the first tile's part is stored
    sums += dq
    found = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q32 * scale, p.mT @ do32))
    for x, new in zip((dk, dv), found, strict=True):
        x.copy_(x + new if step.constants["CHUNKS"] else new)


@pytest.mark.parametrize(
    "n, d, causal",
    [(1, 64, True), (127, 40, False), (128, 64, True), (200, 80, False), (200, 128, True)],
)
@pytest.mark.parametrize(
    "heads, how", [(3, "one sweep"), (1, "one sweep"), (3, "in order"), (1, "chunks")]
)
def test_sums_around_the_kernel(monkeypatch, n, d, causal, heads, how):
    """Every sum is set to zero before, and written after; new memory is full of NaN."""
    inputs = random_inputs((1, 3, n, d), (1, heads, n + 1, d), torch.float16)
    q, k, v, do = (laid_out(x, "transposed") for x in inputs)
    truth, programs = in_float64(q, k, v, do, causal), []
    o, lse = truth["o"].half(), compare.log_sum_exp(q, k, causal).float()
    real = launches._launch_steps

    def launch_all(steps, tensors, struck):
        for step in steps:
            if step.forms:
                programs.append(step.n_programs)
                one_pass(step, [tensors[name] for name in step.tensors])
            else:
                real([step], tensors, struck)
        return [None]

    form = "hopper_chunks" if how == "chunks" else "one_sweep"
    monkeypatch.setattr(launches, "_launch_steps", launch_all)
    monkeypatch.setattr(dispatch, "backward_form", lambda _: form)
    monkeypatch.setattr(dispatch, "chunk_queries_of", lambda _: 128)
    monkeypatch.setattr(dispatch, "hopper_backward_stays", lambda _: False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: how == "in order")
    with filled_with_nan():
        made = launches.backward(do, q, k, v, o, lse, causal, None, (True, True, True))
    tiles, chunks = -(-(n + 1) // 128), -(-n // 128)
    if how == "chunks":
        seen = [min(tiles, chunk + 1) if causal else tiles for chunk in range(chunks)]
        assert programs == [3 * sum(seen)]
    else:
        assert programs == [heads * tiles]
    results = dict(zip(("o", "dq", "dk", "dv"), (o, *made), strict=True))
    for name, error in errors(results, truth).items():
        assert error < 1e-2, (name, error)


@pytest.mark.parametrize("n, heads, wanted", [(32768, 16, 4), (32768, 3, 3), (4096, 15, 8)])
def test_some_heads_run_together_however_long(n, heads, wanted):
    p = problem(torch.empty(1, heads, n, 64, dtype=torch.bfloat16, device="meta"))
    p._backward_sums("one_sweep")
    assert [step.numbers[-2] for step in p.steps if step.forms] == [wanted]


# When they run.


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(launches, "is_hopper", lambda device: True)
    monkeypatch.setattr(dispatch, "in_chunks", lambda *_: False)


def served(*given, **options):
    """Whether the kernels for Hopper run the forward and the backward."""
    p = problem(*given, **options)
    forward = {name: x for name, x in p.tensors.items() if name in ("q", "k", "v", "o")}
    call = launches.call_of(forward, p.call.causal)
    found = dispatch.forward_form(call), dispatch.backward_form(p.call)
    return found[0] == "hopper", found[1] == "one_sweep"


def test_not_on_a_cpu():
    assert served(tensor()) == (False, False)


def test_not_what_the_copy_engine_cannot_address(on_hopper):
    q = tensor()
    odd = torch.zeros(3, 2, 1024, 68, dtype=q.dtype)[..., :64]
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(3, 1024, 2, 64).transpose(1, 2)
    for wrong in (odd, shifted, q[:, :, :1].expand_as(q)):
        assert served(q, wrong) == (False, False)
        assert served(q, do=wrong) == (True, False)


def test_the_stride_of_a_dimension_of_one_is_nobodys():
    x = torch.zeros(2**16, dtype=torch.bfloat16).as_strided((1, 2, 128, 64), (3, 8192, 64, 1))
    assert forms.is_addressable(x)
    assert not forms.is_addressable(x.as_strided((2, 2, 128, 64), (3, 8192, 64, 1)))
    form = forms.form_of(x, 64, 64)
    assert (form.shape, form.strides) == ((1, 2, 128, 64), (64, 8192, 64, 1))


@pytest.mark.parametrize("d, BD", [(40, 64), (64, 64), (80, 128), (128, 128)])
def test_blocks_and_layouts(d, BD):
    """Blocks are of BD columns, whatever of them there is: the copy engine gives zeros beyond."""
    x = tensor(200, d=d)
    form = forms.form_of(x, 128, BD)
    assert (form.shape, form.strides) == (tuple(x.shape), x.stride())
    assert (form.block, form.layout.swizzle_byte_width) == ([1, 1, 128, BD], 128)
    p = problem(x)
    p._backward_sums("one_sweep")
    rows, sums = p.scratch["rows"], p.scratch["dq_sums"]
    n, columns = (256, 128) if BD == 128 else (200, d)
    assert rows.shape == (6, 2, 256) and sums.shape == (6, n, columns)
    form = forms.form_of(rows, (1, 2, 128), BD)
    assert (form.strides, form.layout.swizzle_byte_width) == ((512, 256, 1), 0)
    form = forms.form_of(sums, (1, 64, 64), BD)
    assert (form.strides, form.layout.element_bitwidth) == ((n * columns, columns, 1), 32)


@given(
    st.integers(1, 2**10), st.integers(1, 2**17), st.sampled_from(range(40, 129, 8)), st.booleans()
)
def test_only_forms_that_exist_and_are_compiled(heads, n, d, causal):
    one = call("bf16", heads, n, d, causal)
    consumers, stay = dispatch.forward_consumers(one)
    assert consumers in ((0, 1, 3) if d <= 64 else (0, 1, 2))
    pairs = (stay and consumers < 3) or dispatch.hopper_backward_stays(one)
    pairs |= dispatch.hopper_backward_stays(one._replace(heads=2 * heads))
    assert not (causal and heads % 2 and pairs), "pairs are of two heads"


shapes, tokens = st.sampled_from([(64, 1), (64, 3), (128, 1), (128, 2)]), st.integers(1, 400)


@given(shapes, tokens, tokens, st.booleans())
@example((64, 1), 129, 129, True)
@example((64, 1), 130, 129, True)
def test_ragged_where_a_query_would_see_past_the_last_key(form, n_queries, n_keys, causal):
    d, consumers = form
    q, k = (torch.empty(1, 1, n, d, dtype=torch.bfloat16) for n in (n_queries, n_keys))
    p = problem(q, k, k, causal=causal, multiprocessors=132)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "forward_consumers", lambda _: (consumers, False))
        p._forward_hopper()
        p._backward_sums("one_sweep")
    seen = [step.constants for step in p.steps if step.forms]
    for constants, block in zip(seen, (seen[0]["Bk"], hopper_backward.KEYS.value), strict=True):
        past = range(n_keys, -(-n_keys // block) * block)
        wrong = any(not causal or key <= query for key in past for query in (0, n_queries - 1))
        assert constants["RAGGED"] == wrong


few = st.integers(1, 9)


@given(few, few, st.integers(1, 7), few, st.booleans(), st.booleans())
def test_every_tile_is_done_once_and_causal_programs_have_as_much_to_do(
    n_tiles, n_heads, n_programs, together, causal, stay
):
    """The schedule that the kernels follow, which is Python but for where the program is."""
    pairs = stay and causal
    n_heads *= 1 + pairs
    n_programs = min(n_programs, n_tiles * n_heads // (1 + pairs)) if stay else n_tiles * n_heads
    done, lengths = [], []
    with pytest.MonkeyPatch.context() as patch:
        for program in range(n_programs):
            here = {"program_id": lambda _, p=program: p, "num_programs": lambda _: n_programs}
            patch.setattr(
                hopper_forward, "gl", SimpleNamespace(minimum=min, constexpr=None, **here)
            )
            turns = range(hopper_forward.n_turns.fn(n_tiles, n_heads, causal, stay))
            mine = [
                hopper_forward.tile_and_head.fn(
                    program, turn, n_tiles, n_heads, together, causal, stay
                )
                for turn in turns
            ]
            done += mine
            lengths.append(sum(1 + tile for tile, _ in mine))
    assert sorted(done) == list(itertools.product(range(n_tiles), range(n_heads)))
    if pairs:
        assert max(lengths) - min(lengths) <= n_tiles + 1, "one pair"


@given(few, few, st.integers(1, 7))
def test_in_rounds_there_and_back_every_tile_is_done_once(n_tiles, n_heads, n_programs):
    n_programs = min(n_programs, n_tiles * n_heads)
    done, lengths = [], []
    with pytest.MonkeyPatch.context() as patch:
        there_and_back = hopper_forward._there_and_back.fn
        patch.setattr(hopper_forward, "_there_and_back", there_and_back)
        for program in range(n_programs):
            here = {"program_id": lambda _, p=program: p, "num_programs": lambda _: n_programs}
            patch.setattr(hopper_forward, "gl", SimpleNamespace(**here))
            turns = hopper_forward._n_forward_turns.fn(n_tiles, n_heads, True, True, True)
            mine = [there_and_back(turn) for turn in range(turns)]
            done += mine
            lengths.append(sum(n_tiles - number // n_heads for number in mine))
    assert sorted(done) == list(range(n_tiles * n_heads))
    assert max(lengths) - min(lengths) <= n_tiles, "the longest tile"


@given(few, few, few, st.booleans())
def test_a_program_waits_for_programs_that_began_before_it(n_tiles, n_heads, together, causal):
    """In a fixed order a tile waits for the lower tiles of its head, and numbers are given out as
    programs begin: nobody waits for one that may never begin."""
    begun = {head: [] for head in range(n_heads)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_forward, "gl", SimpleNamespace(minimum=min, constexpr=None))
        for number in range(n_tiles * n_heads):
            tile, head = hopper_forward.tile_and_head.fn(
                number, 0, n_tiles, n_heads, together, causal, False
            )
            begun[head].append(tile)
    assert set(map(tuple, begun.values())) == {tuple(range(n_tiles))}


# What a pass that ran before launches.


@pytest.fixture
def log(monkeypatch, on_hopper):
    found = []
    stand_in(monkeypatch, found)
    return found


def named(args, tensors):
    """The arguments, tensors and those of descriptors by name, with what descriptors say."""
    names = {x.data_ptr(): name for name, x in tensors.items()}
    found = []
    for x in args:
        if hasattr(x, "base"):
            name = names.get(x.base.data_ptr(), "own")
            x = name, x.shape, x.strides, x.block_shape, x.layout
        elif isinstance(x, torch.Tensor):
            x = names.get(x.data_ptr(), "own")
        elif x in names or isinstance(x, int) and x > 2**32:  # an address
            x = names.get(x, "own")
        found.append(x)
    return found


def test_a_kept_pass_describes_the_tensors_of_each_call(log):
    seen, kept = [], []
    for _ in range(3):
        tensors = run(*(tensor() for _ in range(3)))
        kept.append(tensors)
        seen.append([(name, n, named(args, tensors)) for name, n, args in log])
        log.clear()
    kernels = ["hopper_forward", "prepare", "hopper_backward", "finish"]
    assert [name for name, *_ in seen[0]] == kernels
    assert seen[0] == seen[1] == seen[2] and len(launches._kept) == 2
    shape, strides = (3, 2, 1024, 64), (131072, 64, 128, 1)
    forward, backward = seen[0][0][2], seen[0][2][2]
    assert [x[:3] for x in forward[:4]] == [(x, shape, strides) for x in ("q", "k", "v", "o")]
    assert [x[0] for x in backward[:6]] == ["q", "o", "k", "v", "own", "own"]
    assert [x[0] for x in backward[6:8]] == ["dk", "dv"]


@pytest.mark.parametrize("least", [1, 1000])
def test_a_fixed_order_is_a_form_of_its_own_and_of_few_programs_plain_tritons(
    log, monkeypatch, least
):
    monkeypatch.setattr(dispatch, "ORDERED_PROGRAMS", least)
    inputs, seen = [tensor() for _ in range(3)], []
    for fixed in (False, True, False, True):
        log.clear()
        with filled_with_nan() if fixed else contextlib.nullcontext():
            run(*inputs)
        seen.append([name for name, *_ in log])
    assert seen[:2] == seen[2:]
    assert ("hopper_backward" in seen[1]) == (least == 1) and "hopper_backward" in seen[0]

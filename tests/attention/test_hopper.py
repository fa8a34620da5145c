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
from attention_standins import run, stand_in
from hypothesis import example, given
from hypothesis import strategies as st

from a2lib.attention import dispatch, forms, hopper_backward, hopper_forward, launches

BACKWARD = ("do", "q", "k", "v", "o", "lse", "dq", "dk", "dv")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")


def tensor(length=1024, heads=2, d=64, dtype=torch.bfloat16):
    """(3, heads, length, d), as a model's projections lie."""
    return torch.zeros(3, length, heads, d, dtype=dtype).transpose(1, 2)


def problem(q, k=None, v=None, do=None, causal=True, **options):
    """A backward over these; ``options`` are of its ``dispatch.Call``."""
    k, v, do = (x if y is None else y for x, y in zip((q, q, q), (k, v, do), strict=True))
    made = (torch.empty_like(x) for x in (q, k, v))
    inputs = (do, q, k, v, torch.empty_like(q), torch.zeros(q.shape[:-1]))
    return pass_of((*inputs, *made), causal, **options)


def pass_of(tensors, causal, **options):
    tensors = dict(zip(BACKWARD, tensors, strict=True))
    call = launches.call_of(tensors, causal)._replace(**options)
    return forms.Pass(tensors, call, 1 / math.sqrt(call.head_dim))


def launch_steps(p, sweep):
    """Run what was made of a pass; ``sweep(step, tensors)`` stands for the kernel for Hopper."""
    for step in p.steps:
        tensors = [p.tensors[name] for name in step.tensors]
        if step.forms:
            sweep(step, tensors)
        else:
            kernel = launches.kernel_of(step.kernel)
            launches._compile_and_run(kernel, step.n_programs, tensors, *step[3:6])


def one_pass_of(step, tensors):
    one_pass(*tensors, *step.numbers[:2], *(step.constants[name] for name in ONE_PASS))


# What stands before and after the one-pass kernel.


def permuted(x):
    """Each tile of 64 by 64 as four warps store a product's sums: a thread has two neighbours of a
    row and of the eighth row after it, in every eight columns, and stores such four at a time."""
    ranges = map(torch.arange, (8, 4, 32, 2, 2))
    eight, warp, lane, lower, odd = torch.meshgrid(*ranges, indexing="ij")
    row, column = 16 * warp + 8 * lower + lane // 4, 8 * eight + 2 * (lane % 4) + odd
    tiles = x.unflatten(-1, (-1, 64)).unflatten(-3, (-1, 64)).transpose(-3, -2)
    return tiles[..., row, column].reshape(tiles.shape).transpose(-3, -2).reshape(x.shape)


ONE_PASS = "CAUSAL", "CHUNKS", "ORDERED"


def one_pass(q, do, k, v, sums, rows, dk, dv, turns, scale, scale2, causal, chunks, ordered):
    """``hopper_backward.backward_kernel`` in PyTorch."""
    heads, n = q.shape[:2], q.shape[2]
    group = heads[1] // k.shape[1]
    q32, do32 = q.float(), do.float()
    k32, v32 = (x.float().repeat_interleave(group, 1) for x in (k, v))
    lse, delta = (rows[:, i, :n].reshape(*heads, n, 1) for i in (0, 1))
    p = torch.exp2(q32 @ k32.mT * scale2 - lse)
    p = p.tril() if causal else p
    ds = p * (do32 @ v32.mT - delta)
    dq, d = (ds @ k32).flatten(0, 1), q.shape[3]
    if d > 64:  # whole tiles: what is past the last query or column is nobody's
        dq = permuted(F.pad(dq, (0, 128 - d, 0, sums.shape[1] - n), value=math.nan))
    if ordered:
        assert (turns == 0).all()
        sums.zero_()  # the first tile's part is stored
    sums += dq
    found = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q32 * scale, p.mT @ do32))
    for x, new in zip((dk, dv), found, strict=True):
        x.copy_(x + new if chunks else new)


@pytest.mark.parametrize(
    "n, d, causal",
    [(1, 64, True), (127, 40, False), (128, 64, True), (200, 80, False), (200, 128, True)],
)
@pytest.mark.parametrize("heads, fixed_order", [(3, False), (1, False), (3, True)])
def test_prepare_and_finish_around_one_pass(monkeypatch, n, d, causal, heads, fixed_order):
    inputs = random_inputs((1, 3, n, d), (1, heads, n + 1, d), torch.float16)
    q, k, v, do = (laid_out(x, "transposed") for x in inputs)
    truth = in_float64(q, k, v, do, causal)
    o, lse = truth["o"].half(), compare.log_sum_exp(q, k, causal).float()
    made = torch.full_like(q, math.nan), torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    p = pass_of((do, q, k, v, o, lse, *made), causal, fixed_order=fixed_order)
    monkeypatch.setattr(dispatch, "hopper_backward_stays", lambda *_: False)
    p._backward_one_sweep()
    for x in p.own.values():
        x.fill_(math.nan if x.dtype.is_floating_point else -1)
    seen = {}

    def sweep(step, tensors):
        seen.update({name: x.clone() for name, x in p.own.items()}, programs=step.n_programs)
        one_pass_of(step, tensors)

    launch_steps(p, sweep)
    rows = seen["rows"].view(1, 3, 2, -1)
    torch.testing.assert_close(rows[:, :, 0, :n], lse / math.log(2))
    torch.testing.assert_close(rows[:, :, 1, :n], (do.float() * o.float()).sum(-1))
    assert rows.shape[-1] % 128 == 0 and (rows[:, :, 0, n:] == math.inf).all()
    assert (rows[:, :, 1, n:] == 0).all()
    assert (seen["sums"].isnan() if fixed_order else seen["sums"] == 0).all()
    assert seen["programs"] == heads * -(-(n + 1) // 128)
    results = dict(zip(("o", "dq", "dk", "dv"), (o, *made), strict=True))
    for name, error in errors(results, truth).items():
        assert error < 1e-2, (name, error)


@pytest.mark.parametrize("n, d, causal", [(1, 64, True), (130, 40, False), (200, 80, True)])
def test_sums_around_the_kernel_in_chunks(monkeypatch, n, d, causal):
    """Grouped keys too; every sum is set to zero before, and written after."""
    inputs = random_inputs((1, 4, n, d), (1, 2, n + 1, d), torch.float16)
    q, k, v, do = (laid_out(x, "transposed") for x in inputs)
    truth, programs = in_float64(q, k, v, do, causal), []
    o, lse = truth["o"].half(), compare.log_sum_exp(q, k, causal).float()
    real = launches._launch_steps

    def launch_all(steps, tensors, struck):
        for step in steps:
            if step.forms:
                programs.append(step.n_programs)
                one_pass_of(step, [tensors[name] for name in step.tensors])
            else:
                real([step], tensors, struck)
        return [None]

    monkeypatch.setattr(launches, "_launch_steps", launch_all)
    monkeypatch.setattr(dispatch, "chunk_queries_of", lambda call: 128)
    monkeypatch.setattr(dispatch, "in_one_launch", lambda *_: False)
    monkeypatch.setattr(dispatch, "in_chunks", lambda *_: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    with filled_with_nan():
        made = launches.backward(do, q, k, v, o, lse, causal, None, (True, True, True))
    tiles = -(-n // 128)
    assert programs == [4 * (1 + tiles if n > 128 and causal else tiles * -(-(n + 1) // 128))]
    results = dict(zip(("o", "dq", "dk", "dv"), (o, *made), strict=True))
    for name, error in errors(results, truth).items():
        assert error < 1e-2, (name, error)


@pytest.mark.parametrize("n, heads, wanted", [(32768, 16, 4), (32768, 3, 3), (4096, 15, 8)])
def test_some_heads_run_together_however_long(n, heads, wanted):
    p = problem(torch.empty(1, heads, n, 64, dtype=torch.bfloat16, device="meta"))
    p._backward_one_sweep()
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


def test_heads_of_40_to_128_in_steps_of_8_and_of_16_bits(on_hopper):
    for d, yes in {16: 0, 32: 0, 36: 0, 40: 1, 64: 1, 68: 0, 80: 1, 128: 1}.items():
        assert served(tensor(d=d)) == (yes, yes), d
    assert served(tensor(dtype=torch.float16)) == (True, True)
    assert served(tensor(dtype=torch.float32)) == (False, False)
    assert served(tensor(length=0)) == (False, False)
    # Few programs of grouped keys and short rows are plain Triton's backward.
    assert served(tensor(), tensor(heads=1), tensor(heads=1)) == (True, False)
    grouped = tensor(4096, heads=2)
    assert served(tensor(4096, heads=4), grouped, grouped) == (True, True)
    assert served(tensor(length=256, heads=8)) == (True, False)


def test_long_rows_of_few_heads_are_cut_in_eight(on_hopper):
    def queries(*given, **options):
        return dispatch.chunk_queries_of(problem(*given).call._replace(**options))

    cut = {(64, 8191): 0, (64, 8192): 1024, (64, 16384): 2048, (80, 4095): 0, (128, 4096): 512,
           (128, 8193): 1152, (128, 16384): 2048, (32, 16384): 0, (68, 8192): 0}  # fmt: skip
    assert {(d, n): queries(tensor(n, 1, d)) for d, n in cut} == cut
    assert queries(tensor(100, 1), tensor(8192, 1), tensor(8192, 1)) == 512
    assert queries(tensor(4096, 2, 128), *[tensor(4096, 1, 128)] * 2) == 512
    assert queries(tensor(8192, 1, dtype=torch.float32)) == 0
    assert queries(tensor(8192, 1), hopper=False) == 0


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
    rows, sums = p._rows_and_sums(BD == 128)
    n, columns = (256, 128) if BD == 128 else (200, d)
    assert rows.shape == (6, 2, 256) and sums.shape == (6, n, columns)
    assert p._rows_and_sums(False)[1].shape == (6, 200, d)
    form = forms.form_of(rows, (1, 2, 128), BD)
    assert (form.strides, form.layout.swizzle_byte_width) == ((512, 256, 1), 0)
    form = forms.form_of(sums, (1, 64, 64), BD)
    assert (form.strides, form.layout.element_bitwidth) == ((n * columns, columns, 1), 32)


@given(
    st.sampled_from(range(40, 129, 8)), st.integers(1, 2**17), st.integers(1, 2**10), st.booleans()
)
def test_only_forms_that_exist_and_are_compiled(d, n_queries, n_heads, causal):
    consumers, stay = dispatch.hopper_forward(d, n_queries, n_heads, causal)
    assert consumers in ((0, 1, 3) if d <= 64 else (0, 1, 2))
    pairs = stay and consumers < 3
    pairs |= dispatch.hopper_backward_stays(d, -(-n_queries // 128), n_heads, causal)
    assert not (causal and n_heads % 2 and pairs), "pairs are of two heads"


shapes, tokens = st.sampled_from([(64, 1), (64, 3), (128, 1), (128, 2)]), st.integers(1, 400)


@given(shapes, tokens, tokens, st.booleans())
@example((64, 1), 129, 129, True)
@example((64, 1), 130, 129, True)
def test_ragged_where_a_query_would_see_past_the_last_key(form, n_queries, n_keys, causal):
    d, consumers = form
    q, k = (torch.empty(1, 1, n, d, dtype=torch.bfloat16) for n in (n_queries, n_keys))
    p = problem(q, k, k, causal=causal, multiprocessors=132)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "hopper_forward", lambda *_: (consumers, False))
        p._forward_hopper()
        p._backward_one_sweep()
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


@pytest.mark.parametrize("needs", [(True, True, False), (False, True, True)])
def test_not_all_gradients_are_plain_tritons(log, needs):
    run(*(tensor() for _ in range(3)), needs=needs)
    assert {name for name, *_ in log[1:]} == {"backward_dq", "backward_dkdv"}


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

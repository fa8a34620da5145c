"""What surrounds the Gluon kernels, without a GPU: when they run, on what, and what is done before
and after them. The kernels themselves run in tests/gpu/test_attention_hopper.py."""

import itertools
import math
from types import SimpleNamespace

import attention_compare as compare
import pytest
import torch
import torch.nn.functional as F
from attention_compare import errors, filled_with_nan, in_float64, laid_out, random_inputs
from attention_standins import choose
from hypothesis import example, given
from hypothesis import strategies as st

from a2lib.attention import dispatch, hopper_backward, hopper_forward, passes
from a2lib.attention.dispatch import HOPPER, Case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")


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


class OnePass:
    """In place of the Gluon kernel: ``one_pass`` on what the descriptors describe."""

    def __init__(self):
        self.programs, self.before = None, None

    def __getitem__(self, grid):
        def launch(*args, **options):
            args = [getattr(x, "base", x) for x in args]
            self.programs, self.before = grid[0], (args[4].clone(), args[5].clone())
            one_pass(*args[:11], *(options[name] for name in ONE_PASS))

        return launch


@pytest.fixture
def sweep(monkeypatch):
    """A Hopper GPU is here, whose one-pass kernel is PyTorch's."""
    kernel = OnePass()
    monkeypatch.setattr(passes, "gpu_of", lambda device: HOPPER)
    monkeypatch.setattr(hopper_backward, "backward_kernel", kernel)
    choose(monkeypatch, hopper_backward_stays=lambda case: False)
    return kernel


@pytest.mark.parametrize(
    "n, d, causal",
    [(1, 64, True), (127, 40, False), (128, 64, True), (200, 80, False), (200, 128, True)],
)
@pytest.mark.parametrize("heads, fixed_order", [(3, False), (1, False), (3, True)])
def test_prepare_and_finish_around_one_pass(sweep, monkeypatch, n, d, causal, heads, fixed_order):
    inputs = random_inputs((1, 3, n, d), (1, heads, n + 1, d), torch.float16)
    q, k, v, do = (laid_out(x, "transposed") for x in inputs)
    truth = in_float64(q, k, v, do, causal)
    o, lse = truth["o"].half(), compare.log_sum_exp(q, k, causal).float()
    monkeypatch.setattr(dispatch, "backward_form", lambda case: "hopper")
    with filled_with_nan():
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: fixed_order)
        made = passes.backward(do, q, k, v, o, lse, causal, None, (True, True, True))
    sums, rows = sweep.before
    rows = rows.view(1, 3, 2, -1)
    torch.testing.assert_close(rows[:, :, 0, :n], lse / math.log(2))
    torch.testing.assert_close(rows[:, :, 1, :n], (do.float() * o.float()).sum(-1))
    assert rows.shape[-1] % 128 == 0 and (rows[:, :, 0, n:] == math.inf).all()
    assert (rows[:, :, 1, n:] == 0).all()
    assert (sums.isnan() if fixed_order else sums == 0).all()
    assert sweep.programs == heads * -(-(n + 1) // 128)
    results = dict(zip(("o", "dq", "dk", "dv"), (o, *made), strict=True))
    for name, error in errors(results, truth).items():
        assert error < 1e-2, (name, error)


@pytest.mark.parametrize("n, d, causal", [(1, 64, True), (130, 40, False), (200, 80, True)])
def test_sums_around_the_kernel_in_chunks(sweep, monkeypatch, n, d, causal):
    """Grouped keys too; every sum is set to zero before, and written after."""
    inputs = random_inputs((1, 4, n, d), (1, 2, n + 1, d), torch.float16)
    q, k, v, do = (laid_out(x, "transposed") for x in inputs)
    truth = in_float64(q, k, v, do, causal)
    o, lse = truth["o"].half(), compare.log_sum_exp(q, k, causal).float()
    monkeypatch.setattr(dispatch, "queries_per_gluon_chunk", lambda case: 128)
    monkeypatch.setattr(dispatch, "backward_form", lambda case: "hopper_chunks")
    with filled_with_nan():
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
        made = passes.backward(do, q, k, v, o, lse, causal, None, (True, True, True))
    tiles = -(-n // 128)
    seen = 1 + tiles if n > 128 and causal else tiles * -(-(n + 1) // 128)
    assert sweep.programs == 4 * seen
    results = dict(zip(("o", "dq", "dk", "dv"), (o, *made), strict=True))
    for name, error in errors(results, truth).items():
        assert error < 1e-2, (name, error)


@pytest.mark.parametrize("d, BD", [(40, 64), (64, 64), (80, 128), (128, 128)])
def test_blocks_and_layouts(d, BD):
    """Blocks are of BD columns, whatever of them there is: the copy engine gives zeros beyond."""
    x = torch.zeros(3, 200, 2, d, dtype=torch.bfloat16).transpose(1, 2)
    tiled = passes._tiled(x, 128, BD)
    assert (tiled.shape, tiled.strides) == ([*x.shape], [*x.stride()])
    assert (tiled.block_shape, tiled.layout.swizzle_byte_width) == ([1, 1, 128, BD], 128)
    rows, sums = passes.scratch(x, is_permuted=BD == 128)
    n, columns = (256, 128) if BD == 128 else (200, d)
    assert rows.shape == (6, 2, 256) and sums.shape == (6, n, columns)
    tiled = passes._in_blocks(rows, (1, 2, 128))
    assert (tiled.strides, tiled.layout.swizzle_byte_width) == ([512, 256, 1], 0)
    tiled = passes._in_blocks(sums, (1, 64, 64))
    assert (tiled.strides, tiled.layout.element_bitwidth) == ([n * columns, columns, 1], 32)


def test_the_stride_of_a_dimension_of_one_is_nobodys():
    x = torch.zeros(2**16, dtype=torch.bfloat16).as_strided((1, 2, 128, 64), (3, 8192, 64, 1))
    assert passes._is_addressable(x)
    assert not passes._is_addressable(x.as_strided((2, 2, 128, 64), (3, 8192, 64, 1)))
    assert passes._tiled(x, 64, 64).strides == [64, 8192, 64, 1]


tokens = st.integers(1, 400)


@given(st.sampled_from([64, 128]), tokens, tokens, st.booleans())
@example(128, 129, 129, True)
@example(128, 130, 129, True)
def test_ragged_where_a_query_would_see_past_the_last_key(block, n_queries, n_keys, causal):
    case = Case("bf16", 1, 1, 1, n_queries, n_keys, 64, causal, HOPPER)
    past = range(n_keys, -(-n_keys // block) * block)
    wrong = any(not causal or key <= query for key in past for query in (0, n_queries - 1))
    assert dispatch.is_ragged(case, block) == wrong


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

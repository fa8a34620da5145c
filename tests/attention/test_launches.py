"""A pass that ran before launches the same kernels with the same arguments, worked out once."""

import itertools

import pytest
import torch
from attention_standins import run, stand_in
from refusals import refused

from a2lib.attention import dispatch, forms, launches, tiles
from a2lib.errors import UnsupportedError


@pytest.fixture(autouse=True)
def log(monkeypatch):
    found = []
    stand_in(monkeypatch, found)
    return found


@pytest.fixture
def long_way(monkeypatch):
    """Return the passes that were worked out."""
    passes = []

    class Watched(launches.Pass):
        def __init__(self, *args):
            super().__init__(*args)
            passes.append(self)

    monkeypatch.setattr(launches, "Pass", Watched)
    return passes


def qkv(dtype=torch.bfloat16, length=40, heads=2, d=64):
    return [torch.zeros(3, length, heads, d, dtype=dtype).transpose(1, 2) for _ in range(3)]


def choose(monkeypatch, form):
    """Have the table choose this form of a pass."""
    monkeypatch.setattr(dispatch, "in_one_launch", lambda _: form == "one_launch")
    monkeypatch.setattr(dispatch, "in_chunks", lambda _: form == "query_chunks")
    monkeypatch.setattr(dispatch, "keys_per_chunk", lambda _: 128 * (form == "key_chunks"))


# Of each form dtype, tokens and head size.
KEPT = {
    "one_launch": (torch.bfloat16, 40, 64),
    "two_sweeps": (torch.float32, 40, 128),
    "two_terms": (torch.float32, 256, 128),
    "query_chunks": (torch.bfloat16, 40, 64),
    "key_chunks": (torch.bfloat16, 300, 64),
}
SOME = [(True, True, True), (True, False, False), (False, True, True)]


@pytest.mark.parametrize("block", [2**20, 0], ids=["a block", "apart"])
@pytest.mark.parametrize("needs", SOME)
@pytest.mark.parametrize("form", KEPT)
def test_the_second_time_the_same_is_launched_on_new_tensors(
    log, long_way, monkeypatch, form, needs, block
):
    """Also where what the kernels alone see is one block."""
    choose(monkeypatch, form)
    monkeypatch.setattr(launches, "BLOCK_BYTES", block)
    dtype, length, d = KEPT[form]
    inputs = qkv(dtype, length=length, d=d)
    first = run(*inputs, needs=needs)
    forward, backward = long_way
    assert form in (dispatch.forward_form(forward.call), dispatch.backward_form(backward.call))
    for _ in range(2):
        log.clear()
        again = run(*inputs, needs=needs)
        assert len(long_way) == 2, "nothing was worked out again"
        for name, x in first.items():
            assert about(again[name]) == about(x), name
        n = len(forward.steps)
        check_launches(log[:n], forward, again)
        check_launches(log[n:], backward, again)


def check_launches(log, kept, tensors):
    """They are the steps of a pass, on the tensors of this call and on own ones that lie apart."""
    places = {}
    for step, (kernel, n_programs, args) in zip(kept.steps, log, strict=True):
        assert (kernel, n_programs) == (step.kernel, step.n_programs)
        assert args[len(step.tensors) :] == step.numbers
        for x, address in zip(step.tensors, args, strict=False):
            assert places.setdefault(id(x), address) == address
    here = [(places[id(x)], x.nbytes) for x in kept.scratch]
    for name, x in kept.tensors._asdict().items():
        if id(x) in places and tensors.get(name) is not None:
            assert places[id(x)] == tensors[name].data_ptr(), name
            here.append((places[id(x)], x.nbytes))
    end = 0
    for place, n_bytes in sorted(here):
        assert place % 16 == 0 and place >= end
        end = place + n_bytes


def about(x):
    return x if x is None else (x.shape, x.stride(), x.dtype, x.requires_grad)


TOKENS = [
    (0, 0), (100, 100), (300, 300), (1000, 1000), (3000, 3000), (8192, 8192), (16384, 16384),
    (0, 300), (300, 0), (300, 16384), (300, 65536),
]  # fmt: skip


def all_calls():
    """Yield tensors and a call of each kind, whatever the GPU and PyTorch's settings."""
    flags = itertools.product((False, True), repeat=3)
    dtypes, heads_of, sizes = (torch.bfloat16, torch.float32), (0, 1, 16), (16, 32, 64, 128)
    cases = itertools.product(dtypes, heads_of, TOKENS, sizes, flags)
    for dtype, heads, (n_queries, n_keys), d, (causal, hopper, fixed_order) in cases:
        q = torch.empty(1, heads, n_queries, d, dtype=dtype, device="meta")
        k = q.new_empty(1, heads, n_keys, d)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        tensors = forms.Tensors(q, k, k, o=q, lse=lse, do=q, dq=q, dk=k, dv=k)
        call = launches.call_of(tensors, causal)
        options = {"hopper": hopper, "fixed_order": fixed_order}
        yield tensors, call._replace(multiprocessors=132, **options)


# What kernels multiply, also where there are no rows: a kernel of two dtypes does not compile.
OPERANDS = {"ieee": torch.bfloat16, "bf16x6": torch.bfloat16, "fp16x3": torch.float16}


@pytest.mark.triton
def test_every_call_has_launches_and_every_row_of_the_table_a_call():
    """No kernel is without a tile, and no tile is left."""
    used = set()
    for tensors, call in all_calls():
        for pass_ in (forms.Pass.forward, forms.Pass.backward):
            steps = pass_(forms.Pass(tensors, call, 1.0))
            assert steps or not tensors.q.numel()
            for step in steps:
                assert step.kernel in dispatch.KERNELS and step.n_programs > 0
                if step.options.get("STAY"):  # the backward's order and chunks are of others
                    assert not step.options.get("ORDERED") and not step.options.get("CHUNKS")
                if step.tile:
                    used.add(step.tile)
                    # The forward splits q by itself.
                    operands = step.tensors[1:3] if "forward" in step.kernel else step.tensors[:3]
                    for x in operands:
                        assert x.dtype == OPERANDS[step.options["PRECISION"]], step.kernel
    table = set()
    for key, rows in tiles.TILES.items():
        table |= {(key, row.tile) for row in rows}
    assert used == table


def test_one_tensor_given_twice_does_not_bind_the_next_call(log):
    q, k, v = qkv()
    launches.forward(q, q, q, True, None)
    log.clear()
    results = launches.forward(q, k, v, True, None)
    ((_, _, args),) = log
    assert args[:5] == tuple(x.data_ptr() for x in (q, k, v, *results))


def test_what_differs_is_worked_out(long_way):
    q, k, v = qkv()
    launches.forward(q, k, v, True, None)
    others = (
        (q, k, v, False, None),
        (q, k, v, True, 0.5),
        (q.contiguous(), k, v, True, None),
        (q, k, v.contiguous(), True, None),
        (q[:, :, :39], k, v, True, None),
        (q.half(), k.half(), v.half(), True, None),
        (q, k[:, :1], v[:, :1], True, None),
    )
    for number, other in enumerate(others, 2):
        for _ in range(2):
            launches.forward(*other)
            launches.forward(q, k, v, True, None)
        assert len(long_way) == number
    launches.forward(q.detach().requires_grad_(), k, v, True, None)  # no difference
    assert len(long_way) == 1 + len(others)


def test_settings_are_part_of_the_form(long_way, monkeypatch):
    q, k, v = qkv(torch.float32)
    for fixed in (False, True, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda x=fixed: x)
        launches.forward(q, k, v, True, None)
    assert len(long_way) == 2
    for without in (("consumers",), (), ("consumers",)):
        monkeypatch.setattr(dispatch, "without", frozenset(without))
        launches.forward(q, k, v, True, None)
    assert len(long_way) == 3


def test_what_is_misaligned_or_has_to_be_copied_goes_the_long_way_each_time(long_way):
    q, k, v = qkv()
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(3, 40, 2, 64).transpose(1, 2)
    copied = torch.zeros(3, 2, 64, 40, dtype=q.dtype).transpose(2, 3)
    for other in (shifted, q, shifted, copied, copied):
        launches.forward(other, k, v, True, None)
    assert len(long_way) == 5


def test_what_is_kept_is_bounded_and_nothing_where_nothing_runs(monkeypatch):
    monkeypatch.setattr(launches, "CAPACITY", 3)
    launches.forward(*qkv(length=0), True, None)
    assert not launches._kept
    for length in range(1, 9):
        launches.forward(*qkv(length=length), True, None)
    assert 0 < len(launches._kept) <= 3


# A GPU with less shared memory.


def test_a_tile_that_does_not_fit_is_struck_and_the_pass_begins_again(log, monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")
    monkeypatch.setattr(tiles, "struck", set())
    real, refused_tiles = launches.compile_and_launch, []

    def run_smaller(step):
        if step.options.get("Bq", 0) > most:
            refused_tiles.append(step.options["Bq"])
            raise errors.OutOfResources(300, 200, "shared memory")
        return real(step)

    monkeypatch.setattr(launches, "compile_and_launch", run_smaller)
    most = 32
    q, k, v = qkv()
    launches.forward(q, k, v, True, None)
    assert refused_tiles == [64, 64] and [name for name, *_ in log] == ["forward"]
    launches.forward(q[:, :, :39], k, v, True, None)
    assert len(refused_tiles) == 2, "known by now"
    most = 0
    words = "no forward tile for head_dim 64 in bf16 that fits the GPU's shared memory"
    refused(words, launches.forward, q[:, :, :38], k, v, True, None, error=UnsupportedError)

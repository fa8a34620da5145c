"""A pass that ran before launches the same kernels with the same arguments, worked out once."""

import itertools
import math

import pytest
import torch
from attention_standins import run, stand_in, watch_steps
from refusals import refused

from a2lib.attention import dispatch, forms, launches
from a2lib.errors import UnsupportedError


@pytest.fixture(autouse=True)
def log(monkeypatch):
    found = []
    stand_in(monkeypatch, found)
    return found


@pytest.fixture
def long_way(monkeypatch):
    """The passes that were worked out."""
    passes = []
    real = launches.Pass
    monkeypatch.setattr(launches, "Pass", lambda *args: passes.append(real(*args)) or passes[-1])
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
SOME = [(True, True, True), (False, True, False), (True, False, False), (False, True, True)]
CASES = list(itertools.product(KEPT, SOME))


@pytest.mark.parametrize("block", [2**20, 0], ids=["a block", "apart"])
@pytest.mark.parametrize("form, needs", CASES)
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
        assert list(map(about, again.values())) == list(map(about, first.values()))
        n = len(forward.steps)
        check_launches(log[:n], forward, again)
        check_launches(log[n:], backward, again)


def check_launches(log, kept, tensors):
    """They are the steps of a pass, on the tensors of this call and on own ones that lie apart."""
    places, sizes = {}, {name: x.nbytes for name, x in kept.scratch.items()}
    assert [call[:2] for call in log] == [(step.kernel, step.n_programs) for step in kept.steps]
    for step, (_, _, args) in zip(kept.steps, log, strict=True):
        assert args[len(step.tensors) :] == step.numbers
        places |= dict(zip(step.tensors, args, strict=False))
    for name, x in tensors.items():
        if x is not None and name in places:
            assert places[name] == x.data_ptr(), name
            sizes[name] = x.nbytes
    found = sorted((places[name], size) for name, size in sizes.items())
    assert all(at % 16 == 0 for at, _ in found)
    assert all(at + size <= next for (at, size), (next, _) in itertools.pairwise(found))


def about(x):
    return x if x is None else (x.shape, x.stride(), x.dtype, x.requires_grad)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("length, d, one", [(128, 64, 1), (129, 64, 0), (256, 32, 1), (128, 65, 1)])
def test_few_tokens_are_one_launch_in_any_order(log, monkeypatch, fixed, length, d, one):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: fixed)
    q, k, v = qkv(length=length, d=d)
    run(q, k[:, :1], v[:, :1])
    launched = [(name, n) for name, n, _ in log[1:]]
    rows = 64 if d <= 64 else 16
    assert launched == [("backward", length // rows * (6 + 3))] if one else len(launched) == 2
    log.clear()
    run(q, k, v, needs=(True, False, True))
    assert len(log[1:]) == len(launched), "also where a gradient is not wanted"


TOKENS = [(n, n) for n in (0, 100, 300, 1000, 3000, 8192, 16384)]
TOKENS += [(0, 300), (300, 0), (300, 16384), (300, 65536)]
FLAGS = "causal", "hopper", "fixed_order", "tf32"


@pytest.mark.triton
def test_every_call_has_launches_and_every_row_of_the_table_a_call():
    """Whatever the GPU and PyTorch's settings: no kernel is without a tile, and no tile is left."""
    used = set()
    dtypes, heads_of, sizes = (torch.bfloat16, torch.float32), (0, 1, 16), (16, 32, 64, 128)
    shapes = itertools.product(dtypes, heads_of, TOKENS, sizes)
    settings = itertools.product((False, True), repeat=len(FLAGS))
    for (dtype, heads, lengths, d), chosen in itertools.product(shapes, settings):
        q, k = (torch.empty(1, heads, n, d, dtype=dtype, device="meta") for n in lengths)
        tensors = {"lse": torch.empty(q.shape[:-1], device="meta")}
        tensors |= dict.fromkeys(("q", "o", "do", "dq"), q)
        tensors |= dict.fromkeys(("k", "v", "dk", "dv"), k)
        options = dict(zip(FLAGS, chosen, strict=True))
        call = launches.call_of(tensors, False)._replace(multiprocessors=132, **options)
        for pass_ in (forms.Pass.forward, forms.Pass.backward):
            steps = pass_(forms.Pass(tensors, call, 1.0))
            assert all(step.kernel in dispatch.KERNELS and step.n_programs > 0 for step in steps)
            assert steps or not q.numel()
            for step in steps:
                if step.constants.get("STAY"):  # the backward's order and chunks are of others
                    assert not step.constants.get("ORDERED") and not step.constants.get("CHUNKS")
            used |= {step.tile for step in steps if step.tile}
    assert used == {(key, row.tile) for key, rows in dispatch.TILES.items() for row in rows}


@pytest.fixture
def launched(monkeypatch):
    """The steps that are launched, on a GPU of 132 multiprocessors."""
    found = []
    watch_steps(monkeypatch, found)
    monkeypatch.setattr(forms, "launches_early", lambda _: True)
    monkeypatch.setattr(launches, "n_multiprocessors", lambda _: 132)
    return found


def test_tiles_of_rows_in_chunks(launched):
    usual = (64, 64, 8, 3)
    for length, heads, tile in (
        (512, 1, (64, 32, 4, 3)),  # 72 programs
        (512, 4, usual),  # would be 160
        (641, 1, usual),
        (2047, 1, usual),
        (2048, 1, (32, 64, 4, 3)),
    ):
        run(*(x[:1] for x in qkv(length=length, heads=heads, d=128)))
        (found,) = [step.tile for step in launched if step.kernel == "backward_chunks"]
        assert found[1] == tile, (length, heads)
        launched.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "length, is_causal, early", [(4096, True, 1), (4097, True, 0), (512, False, 1), (513, False, 0)]
)
def test_kernels_of_short_chunks_are_launched_early(launched, dtype, length, is_causal, early):
    run(*(x[:1] for x in qkv(dtype, length=length, heads=1)), causal=is_causal)
    early &= dtype == torch.bfloat16
    names = ["prepare", "backward_chunks", "finish"]
    chunks = [step for step in launched if step.kernel in names]
    assert [step.kernel for step in chunks] == names
    options = [step.options.get("launch_pdl", False) for step in chunks]
    assert options == [False, early, early]


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


def test_a_rung_of_the_ladder_is_worked_out(long_way, monkeypatch):
    for without in ((), ("consumers",), ()):
        monkeypatch.setattr(dispatch, "without", frozenset(without))
        launches.forward(*qkv(), True, None)
    assert len(long_way) == 2


def test_whether_gradients_are_wanted_changes_nothing(long_way):
    q, k, v = qkv()
    for wanted in (False, True, True, False, True):
        launches.forward(q.detach().requires_grad_(wanted), k, v, True, None)
    assert len(long_way) == 1


def test_tf32_is_part_of_the_form(long_way, monkeypatch):
    q, k, v = qkv(torch.float32)
    for allowed in (False, True, True):
        monkeypatch.setattr(launches, "_allow_tf32", lambda allowed=allowed: allowed)
        launches.forward(q, k, v, True, None)
    assert len(long_way) == 2


def test_the_scale_reaches_the_kernel_both_times(log):
    for scale, wanted in ((None, 1 / math.sqrt(64)), (0.25, 0.25), (None, 1 / math.sqrt(64))):
        log.clear()
        launches.forward(*qkv(), True, scale)
        assert wanted in [x for x in log[0][2] if isinstance(x, float)]


def test_what_is_misaligned_or_has_to_be_copied_goes_the_long_way_each_time(long_way):
    q, k, v = qkv()
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(3, 40, 2, 64).transpose(1, 2)
    copied = torch.zeros(3, 2, 64, 40, dtype=q.dtype).transpose(2, 3)
    for other in (shifted, q, shifted, copied, copied):
        launches.forward(other, k, v, True, None)
    assert len(long_way) == 5


def test_nothing_is_kept_where_nothing_runs():
    launches.forward(*qkv(length=0), True, None)
    assert not launches._kept


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(launches, "CAPACITY", 3)
    for length in range(1, 9):
        launches.forward(*qkv(length=length), True, None)
    assert 0 < len(launches._kept) <= 3


def test_what_cannot_run_is_still_refused():
    q, k, v = qkv()
    launches.forward(q, k, v, True, None)
    refused("same shape", launches.forward, q, k, v[:, :, :7], True, None)
    for wrong in ((None, k, v), (q, k, "v")):
        refused("tensors", launches.forward, *wrong, True, None, error=TypeError)
    for wrong, words in (
        ([x.double() for x in (q, k, v)], "runs bfloat16, float16, float32; got torch.float64"),
        (qkv(d=129), "runs head_dim 1 to 128; got 129"),
    ):
        refused(words, launches.forward, *wrong, True, None, error=UnsupportedError)


# One kernel alone, as AdamW's.


class Compiled:
    packed_metadata = ()

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __getitem__(self, grid):
        return lambda *args: self.log.append((self.name, grid, args))


class Compiling:
    """Compiles at each call through it, and says so."""

    arg_names = ("X", "stride", "n", "BLOCK", "FLAG")

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        def call(*args, **kwargs):
            self.log.append(("compiled", grid, args, kwargs))
            return Compiled(self.log, f"kernel {len(self.log)}")

        return call


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launches, "_compiled", {})
    return Compiling()


def launch(kernel, key, x, n=5):
    constants = {"FLAG": True, "BLOCK": 16}
    launches.launch(kernel, key, 7, (x,), (1, n), constants, {"num_warps": 4})
    return kernel.log[-1]


def test_second_launch_is_direct_with_constants_in_the_kernels_order(kernel):
    x = torch.zeros(16)
    kind, grid, args, kwargs = launch(kernel, "a", x)
    assert (kind, grid, args) == ("compiled", (7,), (x, 1, 5))
    assert kwargs == {"FLAG": True, "BLOCK": 16, "num_warps": 4}
    assert launch(kernel, "a", x, n=6) == ("kernel 1", (7, 1, 1), (x.data_ptr(), 1, 6, 16, True))


def test_a_misaligned_tensor_never_meets_a_kept_kernel(kernel):
    x = torch.zeros(16)
    launch(kernel, "a", x)
    assert launch(kernel, "a", x[1:])[0] == "compiled"
    assert launch(kernel, "a", x)[0] == "kernel 1"


def test_kernels_that_are_kept_are_few(kernel, monkeypatch):
    monkeypatch.setattr(launches, "CAPACITY", 3)
    for key in range(10):
        launch(kernel, key, torch.zeros(16))
    assert len(launches._compiled) <= 3


def test_what_the_interpreter_runs_is_not_kept(kernel):
    class Interpreted(Compiling):
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    launches.launch(Interpreted(), "a", 1, (torch.zeros(16),), (1, 1), {"FLAG": 1, "BLOCK": 1}, {})
    assert not launches._compiled


# A GPU with less shared memory.


def test_a_tile_that_does_not_fit_is_struck_and_the_pass_begins_again(log, monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")
    monkeypatch.setattr(launches, "_struck", {})
    real, refused_tiles = launches._compile_and_run, []

    def run_smaller(kernel, n_programs, tensors, numbers, constants, *rest):
        if constants.get("Bq", 0) > most:
            refused_tiles.append(constants["Bq"])
            raise errors.OutOfResources(300, 200, "shared memory")
        return real(kernel, n_programs, tensors, numbers, constants, *rest)

    monkeypatch.setattr(launches, "_compile_and_run", run_smaller)
    most = 32
    q, k, v = qkv()
    launches.forward(q, k, v, True, None)
    assert refused_tiles == [64, 64] and [name for name, *_ in log] == ["forward"]
    launches.forward(q[:, :, :39], k, v, True, None)
    assert len(refused_tiles) == 2, "known by now"
    most = 0
    words = "no forward tile for head_dim 64 in bf16 that fits the shared memory of cpu"
    refused(words, launches.forward, q[:, :, :38], k, v, True, None, error=UnsupportedError)

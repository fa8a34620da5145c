"""Which compiled kernel a launch runs, with a stand-in for Triton's."""

from types import SimpleNamespace

import pytest
import torch

from a2lib.attention import launch as module
from a2lib.attention import passes
from a2lib.attention.launch import Form, described, launch, shortcut_of
from a2lib.attention.tiles import TILES, WHEN_FEW, WHEN_SHORT


class Compiled:
    packed_metadata = ()

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __getitem__(self, grid):
        return lambda *args: self.log.append((self.name, grid, args))


class Kernel:
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
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel()


def run(kernel, key, x, n=5):
    launch(kernel, key, 7, (x,), (1, n), {"FLAG": True, "BLOCK": 16}, {"num_warps": 4})
    return kernel.log[-1]


def test_second_launch_is_direct_with_constants_in_the_kernels_order(kernel):
    x = torch.zeros(16)
    kind, grid, args, kwargs = run(kernel, "a", x)
    assert (kind, grid, args) == ("compiled", (7,), (x, 1, 5))
    assert kwargs == {"FLAG": True, "BLOCK": 16, "num_warps": 4}
    assert run(kernel, "a", x, n=6) == ("kernel 1", (7, 1, 1), (x, 1, 6, 16, True))


def test_a_misaligned_tensor_never_meets_a_kept_kernel(kernel):
    x = torch.zeros(16)
    run(kernel, "a", x)
    assert run(kernel, "a", x[1:])[0] == "compiled"
    assert run(kernel, "a", x)[0] == "kernel 1"


def test_what_is_kept_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "CAPACITY", 3)
    for key in range(10):
        run(kernel, key, torch.zeros(16))
    assert len(module._compiled) <= 3


def test_what_the_interpreter_runs_is_not_kept(kernel):
    class Interpreted(Kernel):
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    launch(Interpreted(), "a", 1, (torch.zeros(16),), (1, 1), {"FLAG": 1, "BLOCK": 1}, {})
    assert not module._compiled


@pytest.fixture
def forward(monkeypatch):
    """``forward(length, head_dim, many)``: programs and sides of the tile of the one launch, where
    there are so many multiprocessors."""

    def launched(length, head_dim, many):
        used = []
        monkeypatch.setattr(passes, "n_multiprocessors", lambda device: many)
        monkeypatch.setattr(passes, "_kernel", lambda name: name)
        monkeypatch.setattr(passes, "launch", lambda *args: used.append((args[2], args[5])))
        q = torch.empty(1, 1, length, head_dim, dtype=torch.bfloat16, device="meta")
        names = ("q", "k", "v", "o", "lse")
        passes._Problem((q, q, q), (q, q[..., 0]), names, True, None).forward()
        ((programs, constants),) = used
        return programs, constants["Bq"], constants["Bk"]

    return launched


@pytest.mark.parametrize("spare, tiles", [(1, WHEN_FEW), (0, TILES), (-1, TILES)])
def test_small_tiles_where_the_first_would_leave_multiprocessors_idle(forward, spare, tiles):
    key, many = ("forward", "16bit", 64, True), 10
    first = TILES[key][0]
    wanted = tiles[key] if tiles is WHEN_FEW else first
    assert forward(first.Bq * (many - spare), 64, many)[1:] == (wanted.Bq, wanted.Bk)


@pytest.mark.parametrize("length, many, short", [(256, 16, 1), (256, 15, 0), (257, 99, 0)])
def test_tiles_of_short_rows_where_each_program_has_a_multiprocessor(
    monkeypatch, forward, length, many, short
):
    monkeypatch.setattr(passes, "keys_per_chunk", lambda *_: 0)
    key = ("forward", "16bit", 128, True)
    wanted = WHEN_SHORT[key][256] if short else TILES[key][0]
    assert forward(length, 128, many) == (-(-length // wanted.Bq), wanted.Bq, wanted.Bk)


@pytest.fixture
def below(monkeypatch):
    """Triton's own launcher, without a GPU: what reaches the compiled part, and what fills maps."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    if not hasattr(driver, "_BASE_ARGS_FORMAT"):
        pytest.skip("only Triton 3.6 has this launcher")
    reached, filled = [], []

    def fill(x, meta):
        filled.append(x.base.data_ptr())
        return [("map", x.base.data_ptr(), meta), *x.shape, *x.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", fill)
    signature = {"A": "tensordesc<fp16[1, 8]>", "B": "tensordesc<fp16[1, 4]>"}
    signature |= {"C": "*fp32", "n": "i32"}
    metas = [{"swizzle": 1}, {"swizzle": 2}]

    def low(*args):
        reached.append([x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args])

    launcher = object.__new__(driver.CudaLauncher)
    launcher.launch = driver.wrap_handle_tensordesc(low, signature, metas)
    for name in ("global_scratch_size", "profile_scratch_size"):
        setattr(launcher, name, 0)
        setattr(launcher, name.replace("size", "align"), 1)
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
    compiled = SimpleNamespace(run=launcher, function=99, packed_metadata=(4, 1, 0))
    compiled.metadata = SimpleNamespace(tensordesc_meta=metas)
    return SimpleNamespace(compiled=compiled, reached=reached, filled=filled)


PLACES = (2, 0, 1)


def through(below, tensors, forms, shortcut):
    """What reaches the compiled part by a shortcut, after a look that Triton's way is the same."""
    below.reached.clear()
    shortcut([x.data_ptr() for x in tensors], 5)
    chosen = described([tensors[i] for i in PLACES], forms)
    compiled = below.compiled
    compiled.run(
        7, 1, 1, 5, compiled.function, compiled.packed_metadata, None, None, None, *chosen, 3
    )
    assert below.reached[0] == below.reached[1]


def forms_of(n):
    return Form((n, 8), (8, 1), [1, 8], None), Form((n, 4), (4, 1), [1, 4], None)


def test_a_shortcut_launches_what_triton_would_and_fills_a_map_once(below, monkeypatch):
    monkeypatch.setattr(module, "MAPS", 4)
    two, three = (
        (x, shortcut_of(below.compiled, 7, PLACES, (3,), x)) for x in map(forms_of, (2, 3))
    )
    some = [[torch.zeros(32) for _ in range(3)] for _ in range(9)]
    for _ in range(2):  # at one address now this form, now that
        for forms, shortcut in (two, three):
            through(below, some[0], forms, shortcut)
    assert len(below.filled) == 4 + 4 * 2, "a map for each form and tensor; Triton's way, each call"
    for tensors in (*some, *some):  # more addresses than are kept
        through(below, tensors, *two)


@pytest.mark.parametrize("change", ["global_scratch_size", "launch", "tensordesc_meta"])
def test_no_shortcut_past_a_launcher_that_is_not_known(below, change):
    compiled = below.compiled
    owner = compiled.metadata if change == "tensordesc_meta" else compiled.run
    new = {"global_scratch_size": 1, "launch": lambda *args: None, "tensordesc_meta": [None] * 2}
    setattr(owner, change, new[change])
    assert shortcut_of(compiled, 7, PLACES, (3,), forms_of(2)) is None
    assert shortcut_of(Compiled([], "stub"), 7, PLACES, (3,), ()) is None

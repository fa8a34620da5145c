"""Which compiled kernel a launch runs, with a stand-in for Triton's."""

import pytest
import torch

from a2lib.attention import launch as module
from a2lib.attention import passes
from a2lib.attention.launch import launch
from a2lib.attention.tiles import TILES, WHEN_FEW


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


def test_another_key_compiles_its_own(kernel):
    x = torch.zeros(16)
    run(kernel, "a", x)
    assert run(kernel, "b", x)[0] == "compiled"
    assert run(kernel, "a", x)[0] == "kernel 1"


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


@pytest.mark.parametrize("spare, tiles", [(1, WHEN_FEW), (0, TILES), (-1, TILES)])
def test_small_tiles_where_the_first_would_leave_multiprocessors_idle(monkeypatch, spare, tiles):
    key = ("forward", "16bit", 64, True)
    first, n_multiprocessors = TILES[key][0], 10
    used = []
    monkeypatch.setattr(passes, "n_multiprocessors", lambda device: n_multiprocessors)
    monkeypatch.setattr(passes, "_kernel", lambda name: name)
    monkeypatch.setattr(passes, "launch", lambda *args: used.append(args[5]))  # keeps nothing
    length = first.Bq * (n_multiprocessors - spare)
    q = torch.empty(1, 1, length, 64, dtype=torch.float16, device="meta")
    names = ("q", "k", "v", "o", "lse")
    passes._Problem((q, q, q), (q, q[..., 0]), names, True, None).forward()
    wanted = tiles[key] if tiles is WHEN_FEW else first
    assert [(each["Bq"], each["Bk"]) for each in used] == [(wanted.Bq, wanted.Bk)]

"""The memory of plain attention on a GPU: tensors as counted, blocks as simulated."""

import pytest

torch = pytest.importorskip("torch")

from a2lib.attention import attention_reference  # noqa: E402
from a2lib.experiments.attention import handlers, limits  # noqa: E402
from a2lib.experiments.attention.configurations import Shape  # noqa: E402
from a2lib.theory.allocator import Allocator  # noqa: E402
from a2lib.theory.eager import PASSES, by_hand_saved  # noqa: E402

pytestmark = pytest.mark.gpu
SHAPES = [Shape("fp32", 8, n, d, causal) for n, d in ((1024, 64), (2048, 16), (4096, 128))
          for causal in (False, True)]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh():
    handlers.take_workspaces("cuda")
    handlers.free_memory("cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_are_those_counted(shape):
    for pass_ in PASSES:
        empty = torch.cuda.memory_allocated()
        inputs = handlers.inputs_of(shape, "cuda", 0, pass_)
        call = handlers.call_of(
            lambda q, k, v: attention_reference(q, k, v, shape.causal), inputs, pass_
        )
        held = torch.cuda.memory_allocated() - empty
        assert held == sum(shape.eager.inputs(pass_).values())
        assert handlers.peak_bytes(call) == shape.eager.peak(pass_)
        del inputs, call
        handlers.free_memory("cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_autograd_saves_what_is_counted(shape):
    counted = {"eager": shape.eager.saved(), "by_hand": by_hand_saved(shape.eager)}
    for name, expected in counted.items():
        qkv = handlers.inputs_of(shape, "cuda", 0, "forward")[:3]
        assert handlers.saved_bytes(handlers.ATTENTIONS[name], qkv, shape.causal) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_are_those_simulated(shape):
    """The first backward after a free cache, and what it has reserved."""
    before = torch.cuda.memory_reserved()
    inputs = handlers.inputs_of(shape, "cuda", 0, "backward")
    call = handlers.call_of(
        lambda q, k, v: attention_reference(q, k, v, shape.causal), inputs, "backward"
    )
    call()
    taken = torch.cuda.memory_reserved() - before
    device, live = Allocator(10**15), {}
    for moment in shape.eager.history("backward"):
        for name in live.keys() - moment.keys():
            device.free(name)
        for name, size in moment.items():
            if name not in live:
                device.allocate(name, size)
        live = moment
    # Small tensors have a pool of their own, 2 MiB at a time, and those before left their segments.
    assert abs(taken - device.reserved) <= 24 * 2**20


def test_the_search_finds_a_length_that_fits():
    key = {"dtype": "fp32", "batch": 8, "head_dim": 16, "causal": False, "pass": "forward"}
    job = type("Job", (), {"seed": 0})
    assert limits._fits(key, job, 256)
    assert not limits._fits(key, job, 2**20)
    assert limits._fits(key, job, 256)  # nothing of what failed is held

"""The memory of plain attention on a GPU: tensors as counted."""

import pytest
import torch

from a2lib.attention import attention_reference
from a2lib.experiments.attention import handlers
from a2lib.experiments.passes import Shape, one_pass
from a2lib.theory.eager import PASSES, by_hand_saved

pytestmark = pytest.mark.gpu
SIZES = (1024, 64), (2048, 16), (4096, 128)
SHAPES = [Shape("fp32", 8, 1, n, d, causal) for n, d in SIZES for causal in (False, True)]


@pytest.fixture(autouse=True)
def fresh():
    handlers.take_workspaces("cuda")
    handlers.free_memory("cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensors_are_those_counted(shape):
    for pass_ in PASSES:
        empty = torch.cuda.memory_allocated()
        *qkv, do = handlers.inputs_of(shape, "cuda", 0, pass_)
        call = one_pass(lambda q, k, v: attention_reference(q, k, v, shape.causal), qkv, do, pass_)
        held = torch.cuda.memory_allocated() - empty
        assert held == sum(shape.eager.inputs(pass_).values())
        assert handlers.peak_bytes(call) == shape.eager.peak(pass_)
        del qkv, do, call
        handlers.free_memory("cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_autograd_saves_what_is_counted(shape):
    counted = {"eager": shape.eager.saved(), "by_hand": by_hand_saved(shape.eager)}
    for name, expected in counted.items():
        qkv = handlers.inputs_of(shape, "cuda", 0, "forward")[:3]
        assert handlers.saved_bytes(handlers.ATTENTIONS[name], qkv, shape.causal) == expected


def test_counting_what_is_saved_leaves_nothing():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for name in ("eager", "by_hand"):
        qkv = handlers.inputs_of(SHAPES[1], "cuda", 0, "forward")[:3]
        handlers.saved_bytes(handlers.ATTENTIONS[name], qkv, True)
    del qkv
    assert torch.cuda.memory_allocated() == before


def test_the_search_finds_a_length_that_fits():
    key = {"dtype": "fp32", "batch": 8, "head_dim": 16, "causal": False, "pass": "forward"}
    job = type("Job", (), {"seed": 0})
    assert handlers._fits(key, job, 256)
    assert not handlers._fits(key, job, 2**20)
    assert handlers._fits(key, job, 256)  # nothing of what failed is held

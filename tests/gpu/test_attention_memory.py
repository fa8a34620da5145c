"""The memory of plain attention on a GPU: tensors as counted, blocks as simulated."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from a2lib.attention import attention_reference
from a2lib.experiments.attention import handlers
from a2lib.experiments.passes import Shape, one_pass
from a2lib.theory.eager import PASSES, by_hand_saved
from a2lib.theory.memory.allocator import Allocator

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


# Shape by shape what the first backward reserves for large tensors, and what is left of it.
RESERVED = """
import json, sys, time, torch
from a2lib.attention import attention_reference
from a2lib.experiments.attention import handlers
from a2lib.experiments.passes import Shape, one_pass

def large():
    return torch.cuda.memory_stats()["reserved_bytes.large_pool.current"]

def backward(shape):
    *qkv, do = handlers.inputs_of(shape, "cuda", 0, "backward")
    def attend(q, k, v):
        return attention_reference(q, k, v, shape.causal)
    one_pass(attend, qkv, do, "backward")()

handlers.prepare()
handlers.take_workspaces("cuda")
found = []
for values in json.loads(sys.argv[1]):
    handlers.free_memory("cuda")
    before = large()
    backward(Shape(**values))
    taken = large() - before
    for _ in range(20):  # autograd's thread lets go of its last tensor when it comes to it
        handlers.free_memory("cuda")
        if large() == before:
            break
        time.sleep(0.1)
    found.append((taken, large() - before))
print(json.dumps(found))
"""


def test_blocks_are_those_simulated():
    """In a process of its own: a test before may have left a small tensor in a large segment, whose
    rest then serves what comes."""
    asked = json.dumps([dataclasses.asdict(shape) for shape in SHAPES])
    command = [sys.executable, "-c", RESERVED, asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    simulated = []
    for shape in SHAPES:
        device, live = Allocator(10**15), {}
        for moment in shape.eager.history("backward"):
            for name in live.keys() - moment.keys():
                device.free(name)
            for name, size in moment.items():
                if name not in live:
                    device.allocate(name, size)
            live = moment
        simulated.append([device.reserved, 0])
    assert dict(zip(map(str, SHAPES), json.loads(done.stdout), strict=True)) == dict(
        zip(map(str, SHAPES), simulated, strict=True)
    )


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

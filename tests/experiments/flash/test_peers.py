"""Each implementation is itself or an exception; each exception is a status and one line. And how
much memory the CPU needs."""

import dataclasses
import sys
from unittest.mock import Mock

import pytest
import torch
from programs import printed

from a2lib.attention import UnsupportedError, attention_reference
from a2lib.experiments.flash import accuracy, ladder, peers, protocols, recomputed
from a2lib.experiments.flash.shapes import Parameters, Shape
from a2lib.lab import failures
from a2lib.theory.attention import PASSES

SHAPE = Shape("fp32", 1, 2, 48, 16, True)


@pytest.mark.parametrize("name", ["eager", "tiled", "sdpa_flash"])
def test_built_implementations_agree(name):
    q, k, v, do = peers.inputs(SHAPE, "cpu", 0)
    o = peers.build(name, SHAPE, "cpu")(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True
    )
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    assert o.dtype == q.dtype and do.requires_grad is False


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_recomputing_backward_gives_the_gradients_of_the_definition(dtype, causal):
    shape = dataclasses.replace(SHAPE, dtype=dtype, causal=causal)
    *qkv, do = peers.inputs(shape, "cpu", 0)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    o = attention_reference(*exact, causal)
    scores = exact[0] @ exact[1].mT / 16**0.5
    if causal:
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
    lse = scores.logsumexp(-1).float()
    found = recomputed.backward(do, *qkv, o.to(do.dtype), lse, causal)
    right = torch.autograd.grad(o, exact, do.double())
    for name, got, want in zip(("dq", "dk", "dv"), found, right, strict=True):
        limit = {"fp32": 2e-6, "bf16": 2e-2}[dtype]
        assert got.dtype == do.dtype and (got - want).norm() < limit * want.norm(), name


def test_ours_with_a_compiled_backward_is_ours_forward_and_pytorchs_backward(configured):
    """In Triton's interpreter; the backward's code is Inductor's for the CPU."""
    assert torch._dynamo.config.error_on_recompile  # until the fixture ends, which looks
    q, k, v, do = peers.inputs(SHAPE, "cpu", 0)
    o = peers.build("compiled_backward", SHAPE, "cpu")(q, k, v)
    assert torch.equal(o, peers.build("a2lib", SHAPE, "cpu")(q, k, v))
    want = torch.autograd.grad(attention_reference(q, k, v, True), (q, k, v), do)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        found = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        for name, got, right in zip(("dq", "dk", "dv"), found, want, strict=True):
            torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-4, msg=name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient"])
def test_a_forced_backend_never_falls_back(name):
    """The CPU has neither; an unforced call would be answered by another backend."""
    q, k, v, _ = peers.inputs(SHAPE, "cpu", 0)
    with pytest.raises(RuntimeError) as caught:
        peers.build(name, SHAPE, "cpu")(q, k, v)
    assert failures.classify(caught.value)[0] == "unsupported"


def test_forced_flash_is_flash():
    q, k, v, _ = peers.inputs(SHAPE, "cpu", 0)
    assert "Flash" in type(peers.build("sdpa_flash", SHAPE, "cpu")(q, k, v).grad_fn).__name__


def test_inputs_follow_shape_and_seed():
    shape = dataclasses.replace(SHAPE, dtype="bf16")
    first, again, other = (peers.inputs(shape, "cpu", seed) for seed in (1, 1, 2))
    assert all(t.shape == (1, 2, 48, 16) and t.dtype == torch.bfloat16 for t in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], first[1])


def wrapped(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize("error, status", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB"), "oom"),
    (wrapped(RuntimeError("backend failed"), torch.OutOfMemoryError("no room")), "oom"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "oom"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`"), "oom"),
    (MemoryError(), "oom"),
    (UnsupportedError("head_dim 256"), "unsupported"),
    (NotImplementedError("only inference"), "unsupported"),
    (RuntimeError("No available kernel. Aborting execution."), "unsupported"),
    (RuntimeError("No valid triton configs. OutOfMemoryError: out of resource"), "unsupported"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), "error"),
    (ValueError("in /home/someone/x.py\ntwo"), "error"),
    (RuntimeError(), "error"),
])  # fmt: skip
def test_classify(error, status):
    found, note = failures.classify(error)
    assert found == status
    assert "\n" not in note and "/home" not in note and len(note) <= failures.NOTE_LENGTH


def test_the_reason_of_a_refusal_is_in_pytorchs_warnings():
    warned = [
        "Flash attention kernel not used because: (Triggered internally at /pytorch/x.cpp:1.)",
        "Expected query, key and value to all be of dtype: {Half, BFloat16}. Got Float."
        " (Triggered internally at /pytorch/aten/sdp_utils.h:95.)",
        "CuDNN attention has been runtime disabled. (Triggered internally at x)",
    ]
    _, note = failures.classify(RuntimeError("No available kernel. Aborting execution."), warned)
    assert note.startswith("Expected query") and "Triggered" not in note and "CuDNN" not in note


def test_only_a_spoilt_device_is_lost():
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert failures.is_lost(lost) and failures.is_lost(wrapped(ValueError(), lost))
    for error in (ValueError("x"), torch.OutOfMemoryError("CUDA error: out of memory")):
        assert not failures.is_lost(error)


SUSTAINED = protocols.tasks(Parameters(sweep="leaderboard"), "cpu")[1]


@pytest.mark.parametrize(("handler", "task", "rows"), [
    (accuracy.measure, accuracy.task("eager", SHAPE, 1), 4),
    (protocols.measure, SUSTAINED, 1),
    (ladder.measure, ladder.tasks(Parameters(sweep="ladder"), "cpu")[-1], 2),
], ids=["accuracy", "protocols", "ladder"])  # fmt: skip
def test_a_lost_device_is_rows_and_then_the_end_of_the_process(
    put, monkeypatch, handler, task, rows
):
    lost = RuntimeError("CUDA error: an illegal memory access")
    monkeypatch.setattr(peers, "build", lambda *_: Mock(side_effect=lost))
    assert [row["status"] for row in put(handler, task)] == ["error"] * rows
    assert isinstance(put.raised, failures.LostContext)


# In a fork: the peak of a process never falls, and importing has one.
MEASURING = """
import dataclasses, gc, os, resource, sys
from a2lib.lab import memory
from a2lib.experiments.flash import comparison, turns
from a2lib.experiments.flash.shapes import Shape
from a2lib.experiments.harness.worker import Job
from a2lib.theory.attention import PASSES
memory.available_bytes = memory.total_bytes = lambda *_: 1 << 60
turns.TIMING["cpu"] = {"warmup_ms": 0, "rep_ms": 1, "min_n": 1, "max_n": 1}
def peak_after(shape):
    rows = []
    Job.put = lambda job, *more: rows.extend(more)
    wanted = {"eager": [shape.key("eager", pass_) for pass_ in PASSES]}
    comparison.measure(Job({"shape": dataclasses.asdict(shape)}, "cpu", wanted=wanted))
    assert [row["status"] for row in rows] == ["ok"] * len(PASSES), rows
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
gc.freeze()  # what is imported is no garbage: each timing looks for some
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
before = peak_after(Shape("fp32", 1, 1, 64, 32, True))  # loads what is loaded once
print(peak_after(SHAPE) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit there")
def test_the_estimate_is_a_bound_within_about_a_factor_of_two(python, monkeypatch):
    # Else glibc keeps a matrix that was freed in its heap, or not, from run to run.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))
    shape = Shape("fp32", 1, 4, 1024, 32, True)  # a CPU multiplies bf16 at a tenth of the pace
    measured = int(printed(python(MEASURING.replace("SHAPE", repr(shape))), 300))
    bound = max(peers.host_bytes("eager", shape, p) for p in PASSES)
    assert measured <= bound <= 2 * measured + peers._LIBRARIES, (measured, bound)

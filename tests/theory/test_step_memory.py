"""The step, tensor by tensor: against what PyTorch does on a CPU, and against what GPUs measured."""

import csv
import dataclasses
import math

import pytest
import torch

from a2lib.attention import passes
from a2lib.measure import snapshot
from a2lib.model import TransformerLM, cross_entropy
from a2lib.model import attention as attentions
from a2lib.paths import ROOT
from a2lib.theory.allocator import OutOfMemory
from a2lib.theory.saved import block_saved_bytes
from a2lib.theory.step_memory import CATEGORIES, MODES, StepMemory, peak, points, replay
from a2lib.theory.transformer import SIZES, Shape, state_bytes

TINY = StepMemory(Shape(24, 40, 2, 2, 56), 2, 16, cuda=False)


def as_cuda_casts(q, k, v):
    """Eager attention with the softmax in float32, as CUDA's autocast has it and the CPU's not."""
    scores = q @ k.transpose(-1, -2) * (1 / q.shape[-1] ** 0.5)
    query = torch.arange(q.shape[-2])[:, None]
    scores = scores.masked_fill(torch.arange(q.shape[-2]) > query, float("-inf"))
    return torch.softmax(scores.float(), -1) @ v


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """``recorded(step)``: the snapshot of two such steps on the CPU."""
    # Under a dispatch mode the operator runs in the place of the Function that a GPU runs.
    monkeypatch.setattr(attentions, "_get_current_dispatch_mode", lambda: None)
    # Triton's interpreter holds on to what it was given; the tensors are made before a launch.
    monkeypatch.setattr(passes, "check_supported", lambda q: None)
    monkeypatch.setattr(passes._Problem, "_launch", lambda *_: None)

    def record(step):
        if (step.precision, step.attention) == ("bf16", "eager"):
            monkeypatch.setitem(attentions.ATTENTIONS, "eager", as_cuda_casts)
        s = step.shape
        with snapshot.Recorder(tmp_path / "x", "cpu") as recorder:
            model = TransformerLM(s.vocab_size, step.context, s.d_model, s.num_layers, s.num_heads,
                                  s.d_ff, attention=step.attention, seed=0)  # fmt: skip
            tokens, targets = torch.randint(s.vocab_size, (2, step.batch, step.context))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            recorder.watch(model, optimizer)
            for number in range(2):
                with recorder.phase(f"step {number}"):
                    one_step(step, model, optimizer, recorder.phase, tokens, targets)
        return snapshot.read(tmp_path / "x")

    return record


def one_step(step, model, optimizer, phase, tokens, targets):
    narrow = step.precision == "bf16"
    with torch.set_grad_enabled(step.mode != "inference"):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            with phase("forward"):
                output = model(tokens)
            if step.mode in ("inference", "forward"):
                return
            with phase("loss"):
                output = cross_entropy(output, targets)
        with phase("backward"):
            output.backward()
        if step.mode == "train-step":
            with phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        else:
            model.zero_grad()


def made(found, number):
    """(phase, bytes, total after it) of each allocation of one recorded step."""
    changes = []
    for one in found.allocations:
        changes += [(one.first, one.bytes, one)] if one.first >= 0 else []
        changes += [(one.last, -one.bytes, one)] if one.last < math.inf else []
    total = sum(one.bytes for one in found.allocations if one.first < 0)
    rows = []
    for _, change, one in sorted(changes, key=lambda c: c[0]):
        total += change
        if change > 0 and one.phase.startswith(f"step {number}/"):
            rows.append((one.phase.partition("/")[2], change, total, one.category))
    return rows


def expected(step):
    total, rows = sum(step.standing().values()), []
    for event in step.events():
        total += event.bytes if event.made else -event.bytes
        if event.made:
            rows.append((event.phase, event.bytes, total, event.category))
    return rows


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("mode", ["inference", "train-step"])
def test_every_tensor_of_a_step_is_pytorchs(recorded, mode, attention, precision):
    step = dataclasses.replace(TINY, mode=mode, attention=attention, precision=precision)
    found = recorded(step)
    for number in range(2):
        mine = dataclasses.replace(step, first=number == 0)
        want, seen = expected(mine), made(found, number)
        for place, (a, b) in enumerate(zip(want, seen, strict=False)):
            assert a == b, f"step {number}, tensor {place} of {len(want)}: {want[place-3:place+2]} {seen[place-3:place+2]}"
        assert len(want) == len(seen)

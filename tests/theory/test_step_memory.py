"""The step, tensor by tensor, against PyTorch on a CPU; plans and strategies against the step."""

import dataclasses
import itertools
import math

import pytest
import torch
from cuda_casts import as_cuda_casts
from refusals import refused

from a2lib.attention import passes
from a2lib.experiments.workload import MODES as BENCHMARKED
from a2lib.lab import snapshot
from a2lib.model import TransformerLM, cross_entropy
from a2lib.model import attention as attentions
from a2lib.theory.devices import named_device
from a2lib.theory.jobs import Job
from a2lib.theory.layouts import Layout, evaluate
from a2lib.theory.memory.allocator import ROUND, OutOfMemory
from a2lib.theory.memory.step import StepMemory, peak, replay
from a2lib.theory.memory.strategies import strategy_memory
from a2lib.theory.memory.tape import CATEGORIES
from a2lib.theory.memory.tensors import MODES
from a2lib.theory.transformer import SIZES, Shape

TINY = StepMemory(Shape(24, 40, 2, 2, 56), 2, 16, cuda=False)


@pytest.fixture
def recorded(tmp_path, monkeypatch, plain_frames):
    """``recorded(step)``: the snapshot of two such steps on the CPU."""
    # Under a dispatch mode the operator runs in the place of the Function that a GPU runs.
    monkeypatch.setattr(attentions, "_get_current_dispatch_mode", lambda: None)
    # Triton's interpreter holds on to what it was given; the tensors are made before a launch.
    monkeypatch.setattr(passes, "check_supported", lambda q: None)
    monkeypatch.setattr(passes._Problem, "_run", lambda *_: None)

    def record(step):
        if (step.precision, step.attention) == ("bf16", "eager"):
            monkeypatch.setitem(attentions.ATTENTIONS, "eager", as_cuda_casts)
        s = step.shape
        with snapshot.Recorder(tmp_path / "x", "cpu") as recorder:
            model = TransformerLM.from_size(s, step.context, attention=step.attention, seed=0)
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
                optimizer.zero_grad(set_to_none=step.fresh)
        else:
            model.zero_grad(set_to_none=step.fresh)


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
@pytest.mark.parametrize(
    ("mode", "fresh"), [("inference", True), ("train-step", True), ("train-step", False)]
)
def test_every_tensor_of_a_step_is_pytorchs(recorded, mode, fresh, attention, precision):
    how = {"mode": mode, "attention": attention, "precision": precision, "fresh": fresh}
    step = dataclasses.replace(TINY, **how)
    found = recorded(step)
    for number in range(2):
        mine = dataclasses.replace(step, first=number == 0)
        want, seen = expected(mine), made(found, number)
        for place, both in enumerate(zip(want, seen, strict=False)):
            assert both[0] == both[1], f"step {number}, tensor {place} of {len(want)}"
        assert len(want) == len(seen)


def test_a_replay_ends_where_the_device_does():
    step = StepMemory(Shape(1024, 2048, 2, 8), 4, 256)
    found = replay(step)
    assert peak(step).total < found.peak <= found.reserved
    assert replay(step, capacity=found.reserved).reserved <= found.reserved
    with pytest.raises(OutOfMemory) as end:
        replay(step, capacity=peak(step).total)
    assert end.value.wanted % ROUND == 0 < end.value.wanted


@pytest.mark.parametrize(("size", "context"), [("large", 128), ("small", 2048), ("2.7B", 512)])
def test_a_plan_for_one_device_takes_what_is_counted(size, context):
    """The planner's few terms, at the moment that is its largest; tensors, without workspaces."""
    for precision, attention in itertools.product(("fp32", "bf16"), ("eager", "flash")):
        how = {"precision": precision, "attention": attention}
        job = Job(SIZES[size], named_device("H200"), 1, 4, context, **how)
        found = peak(StepMemory(SIZES[size], 4, context, **how)).total
        planned = evaluate(job, Layout(sharding="none")).memory_bytes
        tensors = planned - job.device.workspace
        assert tensors == pytest.approx(found, rel=0.03), how


# The highest is of the blocks, or of the last two the embedding's gradient, and the product of the
# head's weight.
WHOLE = [
    (SIZES["small"], 4, 256), (SIZES["2.7B"], 4, 512), (SIZES["2.7B"], 4, 2048),
    (Shape(24, 40, 2, 2, 56), 2, 16),
    (Shape(32, 96, 3, 2, 100), 2, 8), (Shape(16, 160, 2, 2, 8), 4, 16),
    (SIZES["large"], 4, 128), (SIZES["2.7B"], 1, 128),
]  # fmt: skip


@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "fresh"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_a_strategy_the_peak_is_the_steps_to_the_byte(precision, attention, fresh):
    """One block's moments stand for all: against every tensor of all blocks."""
    for shape, batch, context in WHOLE:
        how = {"precision": precision, "attention": attention, "fresh": fresh}
        step = StepMemory(shape, batch, context, "forward-backward", **how)
        kept, most = strategy_memory(step, "none")
        assert most == peak(step).total - sum(step.standing().values()), (shape, context)
        before = [event for event in step.events() if event.phase in ("forward", "loss")]
        assert kept == sum(event.bytes if event.made else -event.bytes for event in before)


def test_steps_that_cannot_be():
    for name, words in (
        ("mode", "mode 'nap': allowed are inference, forward, forward-backward, train-step"),
        ("precision", "precision 'nap': allowed are fp32, bf16"),
        ("attention", "attention 'nap': allowed are eager, flash"),
    ):
        refused(words, dataclasses.replace, TINY, **{name: "nap"})
    refused("phase 'nap': allowed are forward", peak, TINY, "nap")
    refused("allowed are none", strategy_memory, TINY, "all")
    refused("as ops are linear", strategy_memory, TINY, "selective:all")
    assert snapshot.CATEGORIES == CATEGORIES
    assert set(BENCHMARKED) - set(MODES) == {"overlapped-step"} and set(MODES) < set(BENCHMARKED)

"""The step, tensor by tensor: against PyTorch on a CPU, and against what a GPU measured."""

import dataclasses
import itertools
import math
import re
import statistics

import committed
import pytest
import torch
from cuda_casts import as_cuda_casts

from a2lib.attention import passes
from a2lib.benchmark import MODES as BENCHMARKED
from a2lib.measure import snapshot
from a2lib.model import TransformerLM, cross_entropy
from a2lib.model import attention as attentions
from a2lib.theory.devices import named_device
from a2lib.theory.jobs import Job
from a2lib.theory.layouts import Layout, evaluate
from a2lib.theory.memory import operations, strategies
from a2lib.theory.memory.allocator import OutOfMemory
from a2lib.theory.memory.saved import block_saved_bytes
from a2lib.theory.memory.step import WORKSPACE, StepMemory, asked, peak, points, refused, replay
from a2lib.theory.memory.tape import CATEGORIES
from a2lib.theory.memory.tensors import MODES
from a2lib.theory.transformer import SIZES, Shape, state_bytes

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


def test_what_a_forward_keeps_is_what_its_blocks_keep():
    for precision in ("fp32", "bf16"):
        step = StepMemory(SIZES["small"], 4, 256, "forward", precision)
        end = peak(step).by_category["saved for backward"]
        s, rows, u = step.shape, step.sizes["rows"], step.sizes["stream"]
        rest = 2 * u + rows + (u if precision == "fp32" else 0)
        if precision == "bf16":  # the head's input and weight
            rest += u // 2 + 2 * s.vocab_size * s.d_model
        assert end == s.num_layers * block_saved_bytes(s, 4, 256, "eager", precision) + rest


def test_peaks_by_hand():
    s = Shape(8, 16, 1, 2, 100)
    step = StepMemory(s, 1, 4, first=True)
    state = state_bytes(s)
    found = peak(step, "optimizer")
    assert found.by_category["gradients"] == state.gradients
    assert found.by_category["optimizer state"] == state.optimizer + 4 * 12
    assert found.by_category["parameters"] == state.parameters + 2 * 4 * 2 * 4
    # Loss, and token ids and targets; nothing is left of forward and backward.
    assert found.total - state.total - 4 * 12 - 64 == 4 + 2 * 4 * 8
    inference = dataclasses.replace(step, mode="inference")
    # The logits, the last norm and its input.
    assert peak(inference).made == {"last/logits": 1600, "last/norm": 128, "x1": 128}
    assert [p[0] for p in points(step)][:2] == ["forward", "forward"]
    assert points(step)[-1][1]["gradients"] == 0


def test_workspaces_come_with_their_threads():
    step = StepMemory(SIZES["small"])
    short = StepMemory(SIZES["2.7B"], first=True)
    # The first peaks in the optimizer's phase, the other before its backward's first product.
    assert peak(short).phase == "optimizer"
    first = dataclasses.replace(step, first=True)
    assert list(peak(first).made)[-1] == "last/dlogits"
    for one, threads in ((step, 2), (dataclasses.replace(step, mode="forward"), 1), (short, 2),
                         (first, 1), (dataclasses.replace(first, precision="bf16"), 1),
                         (dataclasses.replace(first, mode="inference"), 1)):  # fmt: skip
        assert asked(one) == peak(one).total + threads * WORKSPACE


def test_the_softmax_of_a_gpu_makes_one_more_tensor():
    gpu, cpu = (StepMemory(SIZES["small"], 4, 1024, cuda=cuda) for cuda in (True, False))
    more = {e.name for e in gpu.events()} - {e.name for e in cpu.events()}
    assert more == {f"{i}a/weighted" for i in range(12)}
    assert peak(gpu, "backward").total >= peak(cpu, "backward").total


def h200(mode, models):
    """Rows of steps as they are; those of the columns ran in a process that captured steps too."""
    wanted = {"compile": "none", "capture": "false", "mode": mode, "phase": "step"}
    for row in committed.measured("benchmark"):
        plain = row["attention"] in ("eager", "flash") and row["precision"] != "bf16_weights"
        if plain and row["peak_bytes"] and row["model"] in models and wanted.items() <= row.items():
            yield row


@pytest.mark.parametrize("mode", ["train-step", "forward-backward"])
def test_the_blocks_are_those_that_an_h200_counted(mode):
    """Not to the byte: what ran before in that process is not known. Where steps were captured
    cuBLAS has kept workspaces for the capture's stream too. Of our attention some rows are tens of
    MiB below, which nothing here explains."""
    rows = list(h200(mode, ("small", "2.7B")))
    assert rows, "no row of the benchmark is there"
    for row in rows:
        precision = "bf16" if row["precision"] == "bf16" else "fp32"
        step = StepMemory(
            SIZES[row["model"]], int(row["batch"]), int(row["context"]), mode, precision,
            row["attention"],
        )  # fmt: skip
        more = 0 if row["precision"] == "fp32" else 2 * WORKSPACE
        off = 1e-2 if row["attention"] == "flash" else 1e-3 if row["precision"] == "fp32" else 2e-3
        found = replay(step).allocated + more
        assert found == pytest.approx(int(row["peak_bytes"]), rel=off), row
    if mode == "train-step":
        assert {row["precision"] for row in rows} == {"fp32", "tf32", "bf16"}


def test_the_tensors_are_those_that_an_h200_counted():
    """To the byte: the processes of this section drop what ran before. Of all rows the page says
    how far they are off; here are the train-steps, and the forwards that were recorded (one
    block by itself is no step). What is allocated is not to the byte: where some blocks are free,
    a tensor may take another than the one that is counted."""
    rows = []
    for section in ("memory", "memory_recording"):
        for row in committed.measured(section):
            whole = row.get("phase", "step") == "step" and row["mode"] != "block"
            whole = whole and row["status"] == "ok"
            if whole and (row["mode"] == "train-step" or section == "memory_recording"):
                rows.append(row)
    assert {row["mode"] for row in rows} == {"inference", "forward", "train-step"}
    for row in rows:
        number = int(row["step_number"])
        one = StepMemory(
            SIZES[row["model"]], int(row["batch"]), int(row["context"]), row["mode"],
            row["precision"], row["attention"], first=number == 0,
        )  # fmt: skip
        assert asked(one) == int(row["tensor_bytes"]), row
        placed = row["model"] in ("small", "2.7B") and "allocated_bytes" in row
        if number and row["precision"] == "bf16" and placed:
            blocks = replay(one).allocated
            few = 8 * 2**20  # of a small model more than a thousandth
            assert blocks == pytest.approx(int(row["allocated_bytes"]), rel=1e-3, abs=few), row


def test_a_replay_ends_where_the_device_does():
    step = StepMemory(Shape(1024, 2048, 2, 8), 4, 256)
    found = replay(step)
    assert peak(step).total < found.allocated <= found.reserved
    assert replay(step, capacity=found.reserved).reserved <= found.reserved
    with pytest.raises(OutOfMemory):
        replay(step, capacity=peak(step).total)


def test_where_a_run_ends_for_want_of_memory():
    step = StepMemory(Shape(1024, 2048, 2, 8), 4, 256)
    most = replay(step).reserved
    assert refused(step, most) is None
    with pytest.raises(OutOfMemory):
        refused(step, sum(step.parameters().values()) // 2)
    ends = {}
    for capacity in range(4 * 2**20, most, 8 * 2**20):
        try:
            found = refused(step, capacity)
        except OutOfMemory as error:
            assert error.wanted % 2**21 == 0 and not ends
            continue
        if found is not None:
            ends[found.number, found.phase] = found
            assert found.reserved <= capacity < found.reserved + found.wanted
    assert list(ends)[0] == (0, "forward") and {n for n, _ in ends} == {0, 1}
    assert (0, "optimizer") in ends  # where the moments are made


def test_an_h200_ran_out_where_the_count_does():
    """Every configuration of the section that did not fit: the same step and phase, for want of a
    segment of the same size. The capacity is what the driver leaves beside the context."""
    rows = [row for row in committed.measured("memory") if row["phase"] == "step"]
    beside = statistics.median(int(r["driver_bytes"]) - int(r["reserved_bytes"])
                               for r in rows if r["driver_bytes"])  # fmt: skip
    failed = [r for r in rows if r["status"] == "oom" and r["step_number"] == "1"]
    assert {r["model"] for r in failed} == {"xl25", "2.7B", "10B"}
    for row in failed:
        one = StepMemory(SIZES[row["model"]], int(row["batch"]), int(row["context"]), row["mode"],
                         row["precision"], row["attention"])  # fmt: skip
        words = r"in step (\d), (\w+): .*allocate ([\d.]+) (\w+)\. .*capacity of ([\d.]+) GiB"
        note = re.match(words, row["note"])
        found = refused(one, int(float(note[5]) * 2**30 - beside))
        assert found is not None and (found.number, found.phase) == (int(note[1]), note[2]), row
        unit = {"MiB": 2**20, "GiB": 2**30}[note[4]]
        assert f"{found.wanted / unit:.2f}" == note[3], row


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


def test_steps_that_cannot_be():
    for name, words in (
        ("mode", "mode 'nap': allowed are inference, forward, forward-backward, train-step"),
        ("precision", "precision 'nap': allowed are fp32, bf16"),
        ("attention", "attention 'nap': allowed are eager, flash"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(TINY, **{name: "nap"})
    with pytest.raises(ValueError, match="phase 'nap': allowed are forward"):
        peak(TINY, "nap")
    assert snapshot.CATEGORIES == CATEGORIES
    assert set(BENCHMARKED) - set(MODES) == {"overlapped-step"} and set(MODES) < set(BENCHMARKED)


@pytest.fixture(params=[1, 3], ids=["dq alone", "chunks"])
def in_one_sweep(request, monkeypatch):
    """Steps whose flash attention holds what a backward in one sweep does: fp32 sums of dq or, in
    chunks, of all three gradients."""

    def in_one(self):
        scores = self.rows * self.of.shape.num_heads
        self.make("rows", 2 * scores)
        self.make("sums", request.param * self.u, "rows sums")

    def forget():
        for cached in (operations.played, peak, strategies._played):
            cached.cache_clear()

    monkeypatch.setattr(operations._Step, "delta", in_one)
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.fixture(scope="module")
def peaks_of_flash():
    def find():
        found = {}
        for (name, shape), context, fresh in itertools.product(
            SIZES.items(), (1024, 16384), (True, False)
        ):
            at = dataclasses.replace(shape, num_layers=3), 4, context
            how = {"precision": "bf16", "attention": "flash", "fresh": fresh}
            for mode in ("forward-backward", "train-step"):
                step = StepMemory(*at, mode, **how)
                found[name, context, fresh, mode] = peak(step).total
            for strategy in ("none", "block", "selective:products", "recursive"):
                made = strategies.strategy_memory(*at, strategy, **how)
                found[name, context, fresh, strategy] = made
        return found

    return find, find()


def test_one_sweep_of_attention_changes_no_peak(peaks_of_flash, in_one_sweep):
    """Attention's backward holds more then, and is not where the step holds most."""
    find, before = peaks_of_flash
    events = StepMemory(SIZES["small"], 4, 1024, "train-step", "bf16", "flash").events()
    assert any(event.name.endswith("/sums") for event in events)
    assert find() == before

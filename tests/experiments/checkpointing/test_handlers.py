"""What a worker stores of strategies, at the smallest sizes; and what is asked of it."""

import pytest
import torch

from a2lib.benchmark.workload import Workload
from a2lib.experiments import checkpointing
from a2lib.experiments.checkpointing import Parameters, handlers
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.measure import CHECKPOINTING
from a2lib.measure.failures import LostContext
from a2lib.theory.memory.checkpointing import cost, plan
from a2lib.theory.memory.strategies import block_bytes
from a2lib.theory.transformer import SIZES


def asked(**over):
    given = {"precision": "fp32", "strategies": "none,half,segments:2", "steps": 2}
    return Parameters(**{**given, **over})


@pytest.fixture
def measured(stored):
    """``measured(**parameters)``: the stored rows by strategy."""

    def measure(device="cpu", **over):
        (task,) = checkpointing.tasks(asked(**over), "cpu")
        made = stored(handlers.measure, CHECKPOINTING, task, device)
        return {row["strategy"]: row for row in made}

    return measure


@pytest.mark.parametrize("gradients", ["fresh", "kept"])
def test_a_cpu_times_steps_and_counts_no_bytes(measured, gradients):
    rows = measured(gradients=gradients)
    assert set(rows) == {"none", "half", "segments:2"}
    for row in rows.values():
        assert (row["status"], row["n"], row["gradients"]) == ("ok", "2", gradients)
        assert 0 < float(row["ms_forward"]) < float(row["ms"])
        assert 0 < float(row["ms_backward"]) < float(row["ms"])
        assert not any(value for name, value in row.items() if name.endswith("_bytes"))


def test_a_strategy_that_fails_is_a_row_and_the_next_goes_on(measured, monkeypatch):
    work = Workload.work

    def refuse(self, phase):
        if self.model.checkpointing == "half":
            raise MemoryError
        return work(self, phase)

    monkeypatch.setattr(Workload, "work", refuse)
    rows = measured()
    assert {name: row["status"] for name, row in rows.items()} == {
        "none": "ok", "half": "oom", "segments:2": "ok",
    }  # fmt: skip
    assert rows["half"]["note"] == "out of memory"


def test_what_ends_the_device_ends_the_process_after_its_row(job, monkeypatch):
    def lose(self, phase):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Workload, "work", lose)
    (task,) = checkpointing.tasks(asked(), "cpu")
    given = job(CHECKPOINTING, task)
    with pytest.raises(LostContext, match="none"):
        handlers.measure(given)
    assert [row["status"] for row in given.store.rows()] == ["error"]


def test_a_gpus_bytes_are_beyond_what_is_held(monkeypatch):
    """On a stand-in: the step stays on the CPU, and what is allocated is made up."""
    config = asked().setting("cpu").config("cpu")
    workload = Workload(config, "cpu")
    # Of each step: before it, then after forward, loss, backward and optimizer.
    counts = iter([100, 180, 190, 150, 110] * 3)
    peaks = iter([0, 300, 308])
    monkeypatch.setattr(handlers, "allocated_bytes", lambda device: next(counts))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 400)
    watch = handlers.Stopwatch
    monkeypatch.setattr(handlers, "Stopwatch", lambda device, *more: watch("cpu", *more))
    monkeypatch.setattr(workload, "device", "cuda")
    row = handlers._measured(workload, "cuda", 2, 30)
    assert (row["held_bytes"], row["kept_bytes"]) == (70, 90)
    assert (row["peak_bytes"], row["reserved_bytes"]) == (208, 400)
    assert row["note"] == "peaks of the steps are 8 bytes apart"


def test_the_handouts_question_comes_first():
    """The best segment and both neighbours, fresh and kept, before everything else."""
    first, second, *rest = Parameters(sweep="all").plan("cuda")
    for gradients, (setting, strategies) in zip(("fresh", "kept"), (first, second), strict=True):
        assert (setting.model, setting.batch, setting.context) == ("2.7B", 4, 2048)
        assert (setting.gradients, setting.precision, setting.layers) == (gradients, "tf32", 32)
        assert strategies[:3] == ("block", "half", "segments:2")
        block, _ = block_bytes(SIZES["2.7B"], 4, 2048, fresh=gradients == "fresh")
        fresh = gradients == "fresh"
        peaks = [cost(plan(f"segments:{k}", 32), block, fresh_gradients=fresh).peak
                 for k in range(1, 33)]  # fmt: skip
        assert min(peaks) == peaks[0]
    assert first[1][-1] == "none"  # which fails
    keys = [{**setting.key(CHECKPOINTING), "strategy": name}
            for setting, names in (first, second, *rest) for name in names]  # fmt: skip
    least = {"block", "recursive", "chain"}
    for layers in (8, 16, 32):
        found = {k["strategy"] for k in keys if (k["layers"], k["gradients"]) == (layers, "kept")}
        assert least <= found


@pytest.mark.parametrize(
    ("given", "complaint"),
    [({"strategies": "segments:5"}, "strategies = 'segments:5': allowed are none, half"),
     ({"layers": 4, "strategies": "segments:8"}, "allowed as k are 1 to 4"),
     ({"precision": "tf32"}, "precision = 'tf32' needs a GPU"),
     ({"strategies": "segments:8"}, "allowed as k are 1 to 4")],
)  # fmt: skip
def test_what_cannot_be_is_one_line(given, complaint, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    defaults = {f: getattr(Parameters(), f) for f in Parameters.__dataclass_fields__}
    with pytest.raises(ParameterError, match=complaint):
        checkpointing.start(checkpointing.check({**defaults, **given}))

"""The experiment on the sharded optimizer: what a sweep asks for, and what is checked."""

import contextlib

import pytest
import torch

from a2lib.experiments import sharded_optimizer
from a2lib.experiments.data_parallel.configurations import Training
from a2lib.experiments.data_parallel.training import Training as Step
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.harness.ranks import Ranks
from a2lib.experiments.harness.sweep import Sweep
from a2lib.experiments.sharded_optimizer import memory, optimizers
from a2lib.experiments.sharded_optimizer.configurations import (
    MOMENTS,
    WRAPPERS,
    Parameters,
    Way,
    in_sides,
    with_and_without,
)
from a2lib.measure import SHARDED_OPTIMIZER, SHARDED_OPTIMIZER_MEMORY, Store, start_run
from a2lib.theory.sharding import STATE, Held
from a2lib.theory.transformer import Shape

TINY = {"model": "tiny", "batch": 2, "context": 8, "precision": "fp32", "attention": "eager",
        "compile": "none", "capture": False}  # fmt: skip
SHAPE = Shape(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=128)


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


def test_the_essential_sweep_has_both_sides_of_the_targets(gpus):
    asked = Parameters(sweep="essential").asked()
    captured, launched = asked.times
    assert captured.capture and not launched.capture and captured.compile == "blocks"
    for training in (captured, launched):
        for side, ways in in_sides(asked.times[training]).items():
            names = {way.optimizer for way in ways}
            assert names == {"plain", "zero" if side == "torch_ddp" else "sharded"}, side
    assert "torch_ddp" not in in_sides(asked.times[captured])
    # The memory of what is timed, in the model of which every tensor is known.
    (eager,) = asked.memory
    assert (eager.compile, eager.capture, eager.model) == ("none", False, captured.model)
    tasks = sharded_optimizer.memory_tasks(asked.memory)
    assert sum(task.size for task in tasks) == 4 * len(MOMENTS) * 2
    whole = Parameters(sweep="all").asked()
    assert set(asked.times) < set(whole.times) and set(asked.memory) < set(whole.memory)
    assert {t.model for t in whole.times if t.precision == "fp32"} == {"xl25", "2.7B"}
    # Of one wrapper the optimizers take turns: one culprit.
    tasks = sharded_optimizer.time_tasks(asked.times)
    assert [len(keys) for task in tasks for keys in task.rows.values()] == [2, 2, 2, 2]


def test_what_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ParameterError, match="sweep = 'all': allowed on two GPUs or more"):
        Parameters(sweep="all").asked()
    with pytest.raises(ParameterError, match="capture = True: allowed with nccl"):
        Parameters(capture=True).asked()
    with pytest.raises(ParameterError, match="capture = True: allowed without torch_ddp"):
        Parameters(capture=True, wrappers="bucketed,torch_ddp")
    with pytest.raises(ParameterError, match="model = 'tiny': sweep all has its own"):
        Parameters(sweep="all", model="tiny")
    (ways,) = Parameters().asked().times.values()
    assert [way.side for way in ways] == ["bucketed", "bucketed", "torch_ddp", "torch_ddp"]
    (ways,) = Parameters(wrappers="copy_engines").asked().times.values()
    assert {way.carrier for way in ways} == {"copy_engines"}


@pytest.mark.gpu
def test_rows_of_two_gpus(tmp_path):
    """Every way, launched and captured, and the memory of each against the formula. Those of two
    processes on the CPU are the notebook's test's."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = {**TINY, "precision": "bf16"}
    ways = [way for wrapper in WRAPPERS for way in with_and_without(wrapper)]
    launched = Training(Ranks(2, "nccl"), **given)
    captured = Training(Ranks(2, "nccl"), **{**given, "capture": True})
    run = start_run(command="test", parameters={}, device="nvidia", data=tmp_path)
    store = Store(SHARDED_OPTIMIZER, "nvidia", data=tmp_path)
    asked = {captured: ways[:4], launched: ways}
    tasks = sharded_optimizer.time_tasks(asked)
    assert Sweep(store, run, "cuda", seed=3).measure(tasks) == 0
    rows = store.rows()
    assert len(rows) == 10 and {(r["status"], r["note"]) for r in rows} == {("ok", "")}, rows
    assert all(float(row["ms_optimizer"]) > 0 for row in rows)
    store = Store(SHARDED_OPTIMIZER_MEMORY, "nvidia", data=tmp_path)
    tasks = sharded_optimizer.memory_tasks({launched: ways})
    assert Sweep(store, run, "cuda", seed=3).measure(tasks) == 0
    rows = store.rows()
    assert {(r["status"], r["note"]) for r in rows} == {("ok", "")}, rows
    for row in rows:
        assert int(row["present_bytes"]) > int(row["parameter_bytes"])
        if row["moment"] == "after":
            counted = Held(SHAPE, 2, row["optimizer"] != "plain", 2, 8).state()
            assert int(row["optimizer_bytes"]) in counted, row
        # Backward runs in a thread of its own, whose calls are to be counted too.
        if row["moment"] == "step" and row["carrier"] == "backend":
            assert int(row["reduced_bytes"]) >= int(row["parameter_bytes"]), row
            gathered = int(row["gathered_bytes"]) + int(row["broadcast_bytes"])
            assert (gathered >= int(row["parameter_bytes"])) is (row["optimizer"] != "plain"), row


@pytest.fixture
def alone():
    """A training of one rank, whose gradients are the mean already."""
    training = Step(TINY, "cpu", rank=0, seed=0)
    training.wrapper = torch.nn.Module()
    training.wrapper.no_sync = contextlib.nullcontext
    return training


class Halves:
    """An optimizer that owns every other parameter, and brings the rest back, or forgets to."""

    def __init__(self, training, right):
        params = training.parameters
        self.mine, self.others = params[::2], params[1::2]
        self.kept = [p.detach().clone() for p in self.others]
        self.inner = torch.optim.AdamW(self.mine, lr=0.0)
        self.state, self.right = self.inner.state, right

    def step(self):
        self.inner.step()
        with torch.no_grad():
            for p, x in zip(self.others, self.kept, strict=True):
                if self.right:
                    p.copy_(x)

    def zero_grad(self, set_to_none=True):
        for p in (*self.mine, *self.others):
            p.grad = None


@pytest.mark.parametrize("right", [True, False])
def test_weights_that_do_not_come_back_are_seen(alone, right):
    optimizer = Halves(alone, right)
    alone.workload.optimizer = optimizer
    alone.step(send=True)
    before = [p.detach().clone() for p in alone.parameters]
    assert (optimizers.unlike(alone, optimizer) == 0) is right
    # Whatever came of it, the next step begins with the same weights on every rank.
    assert all(torch.equal(p, q) for p, q in zip(alone.parameters, before, strict=True))


def test_bytes_of_collectives_are_counted_from_the_calls():
    with memory.Counted() as counted:
        torch.ones(3).add_(1)
    assert counted.bytes == {"reduced_bytes": 0, "gathered_bytes": 0, "broadcast_bytes": 0}
    assert list(memory._tensors([[torch.ones(1)], (torch.ones(2),), 5]))[1].numel() == 2


def test_the_state_of_a_step_is_that_of_the_formula(alone):
    alone.step(send=False)
    state = optimizers.state_tensors(alone.workload.optimizer)
    (counted,) = Held(SHAPE, 1, True, 2, 8).state()
    assert memory.held(state) == counted
    assert Held(SHAPE, 1, False, 2, 8).at("after")[STATE] == counted


def test_a_way_has_the_columns_of_its_rows():
    assert Way.of("zero", "torch_ddp") == Way("zero", "torch_ddp", 25)
    assert Way.of("sharded", "copy_engines") == Way("sharded", "bucketed", 100, "copy_engines")

"""What a worker is given, where what it measures is stored, and what is there to measure on."""

import pytest

from a2lib.experiments.harness.sweep import Sweep
from a2lib.experiments.harness.worker import Job
from a2lib.lab import Store, start_run


@pytest.fixture
def job(tmp_path):
    """``job(section, task, device)`` is what a worker would be given; it stores below tmp_path."""
    run = start_run(command="test", parameters={}, device="cpu", data=tmp_path)

    def make(section, task, device="cpu"):
        store = Store(section, "cpu", tmp_path)
        given = {"wanted": task.rows, "in_turns": task.in_turns, "run": run, "store": store}
        return Job(task.spec, device, **given)

    return make


@pytest.fixture
def stored(job):
    """``stored(handler, section, task, device)``: the rows after a worker has done it."""

    def measure(handler, section, task, device="cpu"):
        given = job(section, task, device)
        handler(given)
        return given.store.rows()

    return measure


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """There is no GPU, and a run has a data folder and locks of its own."""
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("A2LIB_LOCKS", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def measured(tmp_path):
    """``measured(section, tasks)``: the rows that GPUs measure, all of them ok."""
    run = start_run(command="test", parameters={}, device="nvidia", data=tmp_path)

    def measure(section, tasks):
        store = Store(section, "nvidia", data=tmp_path)
        assert Sweep(store, run, "cuda", seed=3).measure(tasks) == 0
        rows = store.rows()
        assert {(row["status"], row["note"]) for row in rows} == {("ok", "")}, rows
        assert len(rows) == sum(task.size for task in tasks)
        return rows

    return measure

"""What a worker stores of strategies, at the smallest sizes; and what is asked of it."""

import pytest

from a2lib.benchmark.workload import Workload
from a2lib.experiments import checkpointing
from a2lib.experiments.checkpointing import Parameters, handlers
from a2lib.measure import CHECKPOINTING


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

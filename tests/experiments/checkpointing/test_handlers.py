"""What a worker stores of strategies, at the smallest sizes."""

from a2lib.experiments import checkpointing
from a2lib.experiments.checkpointing import Parameters, handlers
from a2lib.experiments.workload.workload import Workload
from a2lib.lab import CHECKPOINTING


def test_a_strategy_that_fails_is_a_row_and_the_next_goes_on(stored, monkeypatch):
    work = Workload.work

    def refuse(self, phase):
        if self.model.checkpointing == "half":
            raise MemoryError
        return work(self, phase)

    monkeypatch.setattr(Workload, "work", refuse)
    given = Parameters(precision="fp32", strategies="none,half,segments:2", steps=2)
    (task,) = checkpointing.tasks(given, "cpu")
    rows = stored(handlers.measure, CHECKPOINTING, task)
    found = {row["strategy"]: (row["status"], row["note"]) for row in rows}
    assert found == {"none": ("ok", ""), "half": ("oom", "out of memory"), "segments:2": ("ok", "")}

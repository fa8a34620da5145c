"""Workers that find what tests measure."""

import os
from pathlib import Path

import pytest

from a2lib.experiments.harness.worker import Job
from a2lib.measure import Store, start_run

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def path_of_tests(monkeypatch):
    given = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), given])))


@pytest.fixture
def job(tmp_path):
    """``job(section, task, device)`` is what a worker would be given; it stores below tmp_path."""
    run = start_run(command="test", parameters={}, device="cpu", data=tmp_path)

    def make(section, task, device="cpu"):
        store = Store(section, "cpu", tmp_path)
        return Job(task.spec, device, wanted=task.rows, run=run, store=store)

    return make

"""What every experiment asks for in its whole sweep, on GPUs and on a CPU."""

import dataclasses
import importlib

import pytest

from a2lib.experiments.harness.sweep import identity
from a2lib.measure.sections import notebooks

TWO_GPUS = ("ddp", "fsdp", "sharded_optimizer")  # who have no sweep elsewhere


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", notebooks())
def test_each_row_is_asked_for_once_by_the_whole_key(name, device, gpus):
    gpus(2 if device == "cuda" else 0)
    experiment = importlib.import_module(f"a2lib.experiments.{name}").EXPERIMENT
    given = experiment.Parameters()
    if hasattr(given, "sweep") and not (device == "cpu" and name in TWO_GPUS):
        given = dataclasses.replace(given, sweep="all")
    asked = {section: [] for section in experiment.sections}
    for table in experiment.tables:
        for task in table.tasks(given, device):
            asked[table.section] += task.keys
    for section, keys in asked.items():
        assert all(set(key) == set(section.key) for key in keys), section.name
        assert len({identity(section, key) for key in keys}) == len(keys), section.name
    assert any(asked.values())

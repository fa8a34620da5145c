"""What every experiment asks for in its whole sweep, on GPUs and on a CPU."""

import dataclasses
import importlib
import os
import subprocess
import sys

import pytest

from a2lib.experiments.harness.sweep import identity
from a2lib.measure.device import has_driver
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


@pytest.mark.skipif(has_driver(), reason="torch is asked for its GPUs")
def test_a_notebook_without_a_gpu_loads_no_torch(tmp_path):
    program = """
import importlib, sys
for name in sys.argv[1:]:
    experiment = importlib.import_module(f"a2lib.experiments.{name}").EXPERIMENT
    run = experiment.start(experiment.Parameters())
    for table in experiment.tables:
        table.pending(run)
    assert "torch" not in sys.modules, name
"""
    own = {"A2LIB_DATA": str(tmp_path), "A2LIB_LOCKS": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", program, *notebooks()], env=os.environ | own, check=True, timeout=120
    )

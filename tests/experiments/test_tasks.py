"""What every experiment asks for in its whole sweep, on GPUs and on a CPU, and what it refuses."""

import dataclasses
import importlib

import pytest
from programs import printed
from refusals import refused

from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.harness.sweep import identity
from a2lib.lab.device import has_driver
from a2lib.lab.sections import SECTIONS

# Those that do not hold their experiment yet.
NOTEBOOKS = sorted({s.notebook for s in SECTIONS.values() if s.handler})


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_each_row_is_asked_for_once_by_the_whole_key(name, device, gpus):
    gpus(2 if device == "cuda" else 0)
    experiment = importlib.import_module(f"a2lib.experiments.{name}").EXPERIMENT
    given = experiment.Parameters()
    if hasattr(given, "sweep"):
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
def test_a_notebook_without_a_gpu_loads_no_torch(on_cpu, python):
    program = """
import importlib, sys
for name in sys.argv[1:]:
    experiment = importlib.import_module(f"a2lib.experiments.{name}").EXPERIMENT
    run = experiment.start(experiment.Parameters())
    for table in experiment.tables:
        table.pending(run)
    assert "torch" not in sys.modules, name
"""
    printed(python(program, *NOTEBOOKS))


@pytest.mark.parametrize(("name", "given", "words"), [
    ("compile", {"precision": "tf32"}, "needs a GPU"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_a_run_is_recorded(
    name, given, words, gpus, on_cpu, tmp_path
):
    gpus(0)
    experiment = importlib.import_module(f"a2lib.experiments.{name}").EXPERIMENT

    def start():
        experiment.start(experiment.check({**vars(experiment.Parameters()), **given}))

    refused(words, start, error=ParameterError)
    assert not (tmp_path / "data").exists()

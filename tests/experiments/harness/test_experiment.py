"""A table of a notebook: what it asks for, shows and draws, with a section of its own."""

import dataclasses

import pytest
from experiments.harness.test_run import Parameters
from experiments.harness.toy import TOY, UNTIMED, task

from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.parameters import parameter
from a2lib.experiments.harness.view import Plot


@dataclasses.dataclass(frozen=True)
class Asked(Parameters):
    operations: str = parameter("a", "letters", choices=("", "a", "ab", "abc"))
    sweep: str = parameter("all", "which", choices=("shape", "all"))


def tasks(given, device):
    assert device == "cpu"
    return [task(*given.operations, parts={"c": "raise"})] if given.operations else []


DOUBLE = {"double": lambda row: 2 * float(row["ms"])}
TIMES = Table(TOY, tasks, "A call", ("ms", "n"), derived=DOUBLE, plot=Plot(x="size"))


EXPERIMENT = Experiment(Asked, (TIMES, Table(UNTIMED, tasks, "", ())), "Toys")


@pytest.fixture
def start(on_cpu):
    return lambda **given: EXPERIMENT.start(EXPERIMENT.check({**vars(Asked()), **given}))


def test_a_sweep_goes_on_and_a_shape_is_measured_again(start, capsys):
    first, second, third = start(), start(), start(sweep="shape")
    for run, known in ((first, False), (second, True), (third, False)):
        capsys.readouterr()
        TIMES.measure(run)
        assert ("3 rows are stored already" in capsys.readouterr().out) == known
    assert {row["run"] for row in TIMES.rows(run)} == {third.id}


def test_what_is_not_asked_for_is_said(start, capsys):
    run = start(operations="")
    TIMES.measure_and_show(run)
    assert "Nothing of this is asked for (-p sweep all has it)." in capsys.readouterr().out
    assert TIMES.rows(run) == [] and TIMES.draw(run) is None

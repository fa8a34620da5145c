"""A step of a notebook: the device to itself, and one line when it is interrupted or refused."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from a2lib.errors import OneLine
from a2lib.experiments.harness.parameters import ParameterError, check, parameter
from a2lib.experiments.harness.process import WorkerDied
from a2lib.experiments.harness.run import Interrupted, measures
from a2lib.measure import DeviceBusy, DeviceLock, StoreError

RUN = SimpleNamespace(device="cpu", id="20260102T030405Z-cpu-000000", parameters=None)


@dataclass
class Toy:
    heads: int = parameter(1, "heads")


@pytest.mark.parametrize("kind", [Interrupted, ParameterError, WorkerDied, DeviceBusy, StoreError])
def test_an_error_for_the_reader_is_shown_as_its_line(kind):
    assert issubclass(kind, OneLine)
    assert kind("why")._render_traceback_() == [f"{kind.__name__}: why"]


def test_a_step_holds_the_device_and_gives_it_back():
    @measures
    def step(run, more):
        with pytest.raises(DeviceBusy, match=run.id):
            DeviceLock("cpu").check()
        return more

    assert step(RUN, more=3) == 3
    DeviceLock("cpu").check()


def test_a_step_refuses_what_the_notebook_has_changed_since():
    notebook = {"heads": 1}
    run = SimpleNamespace(device="cpu", id="a", parameters=check(notebook, Toy))
    measured = []
    step = measures(lambda run: measured.append(run.parameters.heads))
    step(run)
    notebook["heads"] = 2
    with pytest.raises(ParameterError, match="heads is 2 by now, and was 1 when this run began"):
        step(run)
    run.parameters = check(notebook, Toy)
    step(run)
    assert measured == [1, 2]

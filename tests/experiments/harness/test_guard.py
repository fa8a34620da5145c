"""A step of a notebook: the device to itself, and one line when it is interrupted or refused."""

import queue
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from jupyter_client.manager import start_new_kernel

from a2lib.errors import OneLine
from a2lib.experiments.harness.parameters import ParameterError, check, parameter
from a2lib.experiments.harness.process import WorkerDied
from a2lib.experiments.harness.run import Interrupted, measures
from a2lib.measure import DeviceBusy, DeviceLock, StoreError

RUN = SimpleNamespace(device="cpu", id="20260102T030405Z-cpu-000000", parameters=None)


@dataclass
class Toy:
    heads: int = parameter(1, "heads")


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_LOCKS", str(tmp_path))


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


def test_an_interrupted_step_says_what_is_kept():
    @measures
    def step(run):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="every row measured so far is stored; to go on, run"):
        step(RUN)
    assert issubclass(Interrupted, KeyboardInterrupt)
    DeviceLock("cpu").check()


def test_interrupting_a_cell_shows_one_line():
    cell = """
from types import SimpleNamespace
from a2lib.experiments.harness.run import measures
import time
@measures
def step(run):
    print("begun", flush=True)
    time.sleep(600)
step(SimpleNamespace(device="cpu", id="a", parameters=None))
"""
    manager, client = start_new_kernel()
    try:
        client.execute(cell)
        shown = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any("ename" in content for content in shown):
            try:
                shown.append(client.get_iopub_msg(timeout=1)["content"])
            except queue.Empty:
                continue
            if shown[-1].get("text") == "begun\n":
                manager.interrupt_kernel()
        (error,) = [content for content in shown if "ename" in content]
        (line,) = error["traceback"]
        assert line.startswith("Interrupted: every row measured so far is stored")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)

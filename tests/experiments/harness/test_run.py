"""A run of a notebook, from its head to its foot, with a section that is none of the report's: a
step has the device to itself, its bar is one output, and what ends it is one line."""

import logging
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from experiments.harness.toy import TOY, UNTIMED, task
from waiting import until

from a2lib.errors import OneLine
from a2lib.experiments.harness import experiment as harness
from a2lib.experiments.harness import output as outputs
from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.parameters import Common, ParameterError, check, parameter
from a2lib.experiments.harness.process import WorkerDied
from a2lib.lab import DeviceBusy, DeviceLock, Store, StoreError, read_runs


@dataclass(frozen=True)
class Parameters(Common):
    size: int = parameter(1, "of it")


TOYS = Experiment(
    Parameters, tuple(Table(section, lambda *_: [], "", ()) for section in (TOY, UNTIMED)), "Toys"
)


def measure(run, section, asked):
    Table(section, lambda *_: [asked], "", ()).measure(run)


def test_what_is_left_is_said_with_the_command_to_go_on(on_cpu, capsys):
    run = TOYS.start(Parameters(time_limit_s=1, size=4))
    assert "command papermill notebooks/toy.ipynb -p size 4" in capsys.readouterr().out
    run.until = None  # a worker may take longer to start
    measure(run, TOY, task("before"))
    run.until = time.time() - 1
    measure(run, TOY, task("a", "b"))
    measure(run, UNTIMED, task("c"))
    TOYS.say_where(run)
    printed = capsys.readouterr().out
    assert run.left == 9 and "Time limit reached: 6 rows are left." in printed
    assert printed.count("papermill notebooks/toy.ipynb -p size 4 -p time_limit_s 1") == 3
    assert "\nRows: $A2LIB_DATA/measured/toy/cpu.csv; run " in printed  # and of no other section
    assert str(run.data) not in printed and "the chapter is Toys." in printed


def test_a_package_without_its_repository_measures_nothing(on_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(harness.paths, "ROOT", tmp_path)
    with pytest.raises(StoreError, match="^a2lib is installed without its repository, .*-e"):
        TOYS.start(Parameters())
    assert not (tmp_path / "data").exists()


def test_the_end_of_a_kernel_is_no_error(on_cpu, caplog):
    TOYS.start(Parameters())
    kernel = logging.getLogger("IPKernelApp")
    kernel.error("KeyboardInterrupt caught in kernel.")
    kernel.error("other")
    assert caplog.messages == ["other"]


def test_a_run_that_could_not_store_is_refused_before_it_is_recorded(on_cpu, tmp_path):
    broken = Store(UNTIMED, "cpu", tmp_path / "data").path
    broken.parent.mkdir(parents=True)
    broken.write_text("other,columns\n")
    with pytest.raises(StoreError):
        TOYS.start(Parameters())
    assert read_runs(tmp_path / "data") == []


INTERRUPTED = """
from experiments.harness import test_run, toy
from a2lib.experiments.harness.experiment import Interrupted
run = test_run.TOYS.start(test_run.Parameters())
asked = toy.task(*"abcdefgh", seconds=0.2)
print("started", flush=True)
try:
    test_run.measure(run, toy.TOY, asked)
except Interrupted as error:
    print(error)
"""


def test_an_interrupted_run_keeps_its_rows_says_so_and_goes_on(on_cpu, tmp_path, capsys, python):
    going = python(INTERRUPTED)
    while "started" not in going.stdout.readline():
        pass
    store = Store(TOY, "cpu", tmp_path / "data")
    until(lambda: len(store.rows()) >= 3)
    going.send_signal(signal.SIGINT)
    said, _ = going.communicate(timeout=60)
    assert going.returncode == 0 and "every row measured so far is stored" in said
    kept = len(store.rows())
    assert 3 <= kept < 24
    run = TOYS.start(Parameters())
    measure(run, TOY, task(*"abcdefgh"))
    assert f"{kept} rows are stored already" in capsys.readouterr().out
    assert len(store.rows()) == 24


def test_an_error_for_the_reader_is_shown_as_its_line():
    for kind in (harness.Interrupted, ParameterError, WorkerDied, DeviceBusy, StoreError):
        assert issubclass(kind, OneLine)
        assert kind("why")._render_traceback_() == [f"{kind.__name__}: why"]


def test_a_step_holds_the_device_and_gives_it_back():
    run = SimpleNamespace(device="cpu", id="20260102T030405Z-cpu-000000", parameters=None)
    with harness.measuring(run), pytest.raises(DeviceBusy, match=run.id):
        DeviceLock("cpu").check()
    DeviceLock("cpu").check()


def test_a_step_refuses_what_the_notebook_has_changed_since():
    notebook = vars(Parameters())
    run = SimpleNamespace(device="cpu", id="a", parameters=check(notebook, Parameters))
    with harness.measuring(run):
        notebook["size"] = 2
    words = "size is 2 by now, and was 1 when this run began"
    with pytest.raises(ParameterError, match=words), harness.measuring(run):
        raise AssertionError("it began")
    run.parameters = check(notebook, Parameters)
    with harness.measuring(run):
        assert run.parameters.size == 2


def test_the_clock_goes_on_while_nothing_else_does(monkeypatch):
    shown = []
    output = SimpleNamespace(update=lambda bundle, raw: shown.append(bundle["text/plain"]))
    monkeypatch.setattr(outputs, "display", lambda bundle, replaceable: output)
    monkeypatch.setattr(outputs, "TICK_S", 0.01)
    monkeypatch.setattr(outputs, "EVERY_S", 0)
    bar = outputs.Progress(3, "steps", "rows")
    bar._started -= 20
    assert until(lambda: shown and "0/3 rows [00:2" in shown[-1])
    bar.step()
    bar.close("done")
    said = list(shown)
    assert "1/3 rows" in said[-1] and said[-1].endswith(" done")
    time.sleep(0.1)
    assert shown == said and not any("\n" in line or "row/s" in line for line in said)

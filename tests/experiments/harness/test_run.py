"""A run of a notebook, from its head to its foot, with a section that is none of the report's."""

import logging
import signal
import time
from dataclasses import dataclass

import pytest
from experiments.harness.toy import TOY, UNTIMED, task
from waiting import until

from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.parameters import Common, parameter
from a2lib.measure import DeviceBusy, DeviceLock, Store, StoreError, read_runs


@dataclass(frozen=True)
class Parameters(Common):
    size: int = parameter(1, "of it")
    compile_workers: int = parameter(0, "processes that compile ahead")


@pytest.fixture
def started(on_cpu, capsys):
    """``started(**parameters)`` is a run that stores under its own data folder, on the CPU."""

    def start(**given):
        run = harness.start(Parameters(**given), "toy", (TOY, UNTIMED))
        run.head = capsys.readouterr().out
        return run

    return start


def test_what_is_left_is_said_with_the_command_to_go_on(started, capsys):
    run = started(time_limit_s=1, size=4)
    run.until = None  # a worker may take longer to start
    harness.measure(run, TOY, [task("before")])
    run.until = time.time() - 1
    harness.measure(run, TOY, [task("a", "b")])
    harness.measure(run, UNTIMED, [task("c")])
    harness.say_where(run, (TOY, UNTIMED), "Toys")
    printed = capsys.readouterr().out
    assert run.left == 9 and "Time limit reached: 6 rows are left." in printed
    assert printed.count("papermill notebooks/toy.ipynb -p size 4 -p time_limit_s 1") == 3
    assert "\nRows: $A2LIB_DATA/measured/toy/cpu.csv; run " in printed  # and of no other section
    assert str(run.data) not in printed and "the chapter is Toys." in printed


def test_the_end_of_a_kernel_is_no_error(started, caplog):
    started()
    kernel = logging.getLogger("IPKernelApp")
    kernel.error("KeyboardInterrupt caught in kernel.")
    kernel.error("other")
    assert caplog.messages == ["other"]


def test_a_run_on_a_busy_device_is_refused_before_it_is_recorded(started, tmp_path):
    with DeviceLock("cpu").held("run a"), pytest.raises(DeviceBusy):
        started()
    assert read_runs(tmp_path / "data") == []


def test_a_run_that_could_not_store_is_refused_before_it_is_recorded(started, tmp_path):
    broken = Store(UNTIMED, "cpu", tmp_path / "data").path
    broken.parent.mkdir(parents=True)
    broken.write_text("other,columns\n")
    with pytest.raises(StoreError):
        started()
    assert read_runs(tmp_path / "data") == []


INTERRUPTED = """
from experiments.harness import test_run, toy
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.run import Interrupted
run = harness.start(test_run.Parameters(), "toy", (toy.TOY,))
asked = [toy.task(*"abcdefgh", seconds=0.2)]
print("started", flush=True)
try:
    harness.measure(run, toy.TOY, asked)
except Interrupted as error:
    print(error)
"""


def test_an_interrupted_run_keeps_its_rows_says_so_and_goes_on(started, tmp_path, capsys, python):
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
    run = started()
    harness.measure(run, TOY, [task(*"abcdefgh")])
    assert f"{kept} rows are stored already" in capsys.readouterr().out
    assert len(store.rows()) == 24

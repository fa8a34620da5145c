"""However a run is ended, nothing of it goes on: make, papermill, kernel, what the kernel started.

The notebook of a throw-away repository starts a process that ends with its standard input, as a
worker does, and waits. Each test ends one of the processes and looks at all of them.
"""

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios

import pytest
from notebook_runs import PAPERMILL, copy_package, shown_on, write_notebook
from programs import write_program
from waiting import is_alive, until

from a2lib.paths import ROOT

WAITING = """
import os, pathlib, subprocess, sys, time
worker = [sys.executable, "-c", "import sys; sys.stdin.read()"]
worker = subprocess.Popen(worker, stdin=subprocess.PIPE)
written = pathlib.Path("pids.new")
written.write_text(f"{os.getppid()} {os.getpid()} {worker.pid}")
written.rename("pids")
time.sleep(600)
"""
MAKE = ["make", "tiny"]
MAKE_BOOK = ["make", "build/data/.ran-tiny"]
DIRECT = [PAPERMILL, "notebooks/tiny.ipynb"]
KEPT = "stopped; every row measured so far is stored."


@pytest.fixture
def repository(tmp_path):
    tmp_path = tmp_path / "a2lib of mine"
    copy_package(tmp_path)
    (tmp_path / "dev").mkdir()
    for name in ("Makefile", "dev/run_notebook.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "dev/install.sh", "dev/constraints.txt"):
        (tmp_path / name).touch()
    programs = tmp_path / ".venv" / "bin"
    write_program(programs / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "papermill").symlink_to(PAPERMILL)
    write_notebook(tmp_path / "notebooks" / "tiny.ipynb", "", WAITING)
    for stamp in (".a2lib-cpu", ".a2lib-cuda"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


@pytest.fixture
def started(repository):
    """``started(command)``: the process, what it shows, and its pid and those of the notebook.

    Without a terminal, as cron starts it: no hangup then helps to end what is left.
    """
    dropped = ("MAKE", "MFLAGS", "A2LIB_", "TRITON_INTERPRET")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env["PYTHONPATH"] = str(repository / "src")
    pids = []

    def apart(in_terminal):
        os.setsid()
        if in_terminal:  # the session's own, which turns ^C into a signal to all in front of it
            os.close(os.open(os.ttyname(0), os.O_RDWR))
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    def start(command, in_terminal=False):
        leader, follower = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
        process = subprocess.Popen(
            command, cwd=repository, env=env, preexec_fn=lambda: apart(in_terminal), **streams
        )
        os.close(follower)
        pids.append(process.pid)
        written = repository / "pids"
        assert until(lambda: written.exists() or process.poll() is not None)
        assert process.poll() is None, shown_on(leader)
        pids.extend(int(word) for word in written.read_text().split())
        return process, leader, pids

    yield start
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def all_end(pids):
    return until(lambda: not any(map(is_alive, pids)), 20)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("command, number", [
    (MAKE, signal.SIGTERM),
    (MAKE_BOOK, signal.SIGTERM),
    (DIRECT, signal.SIGKILL),
], ids=["make-SIGTERM", "book-SIGTERM", "papermill-SIGKILL"])  # fmt: skip
def test_a_signal_ends_all_of_it(started, command, number):
    process, leader, pids = started(command)
    assert len(set(pids)) == (4 if command[0] == "make" else 3)
    process.send_signal(number)
    assert all_end(pids)
    if number != signal.SIGKILL:
        assert KEPT in shown_on(leader)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("command", [MAKE, DIRECT], ids=["make", "papermill"])
def test_control_c_in_a_terminal_ends_all_of_it(started, command):
    process, leader, pids = started(command, in_terminal=True)
    assert termios.tcgetattr(leader)[3] & termios.ISIG
    os.write(leader, b"\x03")
    assert all_end(pids)
    said = shown_on(leader).rpartition("^C")[2]
    assert KEPT in said and len(said.strip().splitlines()) <= 3

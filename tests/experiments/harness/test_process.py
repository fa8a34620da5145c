"""A worker ends with whoever started it, and so does what it started itself."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

from a2lib.experiments.harness.process import Worker

START = "experiments.harness.toy:start"


def test_closing_a_worker_ends_what_it_started():
    worker = Worker(START)
    (event,) = worker.ask({"do": START, "spec": {"seconds": 0}, "device": "cpu", "seed": 0}, 60)
    assert not _ended(event["pid"])
    worker.close()
    try:
        assert _ends(event["pid"])
    finally:
        _kill(event["pid"])


def test_neither_a_worker_nor_what_it_started_outlives_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from a2lib.experiments.harness.process import Worker
        worker = Worker({START!r})
        task = {{"do": {START!r}, "spec": {{"seconds": 100}}, "device": "cpu", "seed": 0}}
        for event in worker.ask(task, 120):
            print(worker._process.pid, event["pid"], flush=True)
    """)
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(map(_ended, pids))
        parent.send_signal(signal.SIGKILL)
    try:
        assert all(map(_ends, pids))
    finally:
        for pid in pids:
            _kill(pid)


def _ends(pid):
    """Whether a process ends by itself within some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not _ended(pid):
        time.sleep(0.05)
    return _ended(pid)


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or read
        return True

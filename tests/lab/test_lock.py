"""The lock on a device: one holder, named to others, gone with its process."""

import errno
import fcntl
import os
import signal
from unittest.mock import Mock

import pytest

from a2lib.lab import DeviceBusy, device_lock

HOLD = """
import time
from a2lib.lab import device_lock
with device_lock("cpu", "run of flash"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_LOCKS", str(tmp_path / "locks"))
    (tmp_path / "locks").mkdir()
    return tmp_path / "locks"


def test_the_second_is_refused_in_a_line_that_names_the_first(python):
    first = python(HOLD)
    assert first.stdout.readline() == "held\n"
    words = f"^this CPU is measured by process {first.pid}, run of flash, since 2.*run again$"
    with pytest.raises(DeviceBusy, match=words), device_lock("cpu", "run of ddp"):
        pass
    first.send_signal(signal.SIGKILL)
    first.wait()
    with pytest.raises(KeyError), device_lock("cpu", "run of ddp"):
        raise KeyError
    with device_lock("cpu", "another, behind an error"):
        pass


def test_everybody_may_lock_what_anybody_made(locks):
    before = os.umask(0o077)
    try:
        with device_lock("cpu", "run of ddp"):
            pass
    finally:
        os.umask(before)
    assert (locks / "a2lib-cpu.lock").stat().st_mode & 0o777 == 0o666


def test_where_no_lock_can_be_taken_a_line_says_so(monkeypatch, capsys):
    refuse = Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with device_lock("cpu", "run of ddp"):
        said = capsys.readouterr().err
    assert said.startswith("this CPU is not locked against others: ") and said.count("\n") == 1

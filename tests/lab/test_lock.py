"""The lock on a device: one holder, named to others, gone with its process."""

import contextlib
import os
import signal
import time
from unittest.mock import Mock

import pytest

from a2lib.errors import OneLine
from a2lib.lab import DeviceBusy, DeviceLock, lock

HOLD = """
import time
from a2lib.lab import DeviceLock
with DeviceLock("cpu").held("run 20260102T030405Z-cpu-000000"):
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
    for attempt in (DeviceLock("cpu").check, DeviceLock("cpu").held("run b").__enter__):
        with pytest.raises(DeviceBusy) as refused:
            attempt()
        message = str(refused.value)
        assert message.startswith(
            f"this CPU is measured by process {first.pid}, run 20260102T030405Z-cpu-000000, since "
        )
        assert "\n" not in message and time.strftime("%Y-", time.gmtime()) in message
        assert isinstance(refused.value, OneLine)
    first.send_signal(signal.SIGKILL)
    first.wait()
    with DeviceLock("cpu").held("run b"):
        with pytest.raises(DeviceBusy, match=f"process {os.getpid()}, run b, since"):
            DeviceLock("cpu").check()
    DeviceLock("cpu").check()


def test_an_instant_of_another_is_waited_for(monkeypatch):
    """Whoever only checks the lock holds it for as long."""
    other = contextlib.ExitStack()
    other.enter_context(DeviceLock("cpu").held(""))
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: other.close())
    with DeviceLock("cpu").held("run b"):
        pass


def test_an_error_inside_gives_it_back():
    with pytest.raises(KeyError), DeviceLock("cpu").held("run a"):
        raise KeyError
    DeviceLock("cpu").check()
    assert DeviceLock("cpu").path.read_text() == ""


def test_everybody_may_lock_what_anybody_made(locks):
    before = os.umask(0o077)
    try:
        DeviceLock("cpu").check()
    finally:
        os.umask(before)
    assert DeviceLock("cpu").path.stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("trouble", ["no folder", "a link", "not to be opened", "no locks"])
def test_where_no_lock_can_be_taken_a_line_says_so(locks, monkeypatch, capsys, trouble):
    device, refuse = DeviceLock("cpu"), Mock(side_effect=PermissionError(13, "Permission denied"))
    if trouble == "no folder":
        locks.rmdir()
    elif trouble == "a link":
        device.path.symlink_to(locks / "elsewhere")
    elif trouble == "not to be opened":
        monkeypatch.setattr(os, "open", refuse)
    else:
        monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with device.held("run a"):
        said = capsys.readouterr().err
    assert said.startswith("this CPU is not locked against others: ") and said.count("\n") == 1
    assert not (locks / "elsewhere").exists()

"""The lock on a device: one holder, named to others, gone with its process."""

import contextlib
import os
import signal
import time

import pytest

from a2lib.errors import OneLine
from a2lib.measure import DeviceBusy, DeviceLock, lock

HOLD = """
import time
from a2lib.measure import DeviceLock
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


def test_a_name_left_by_a_dead_process_is_not_given(locks, python):
    gone = python("")
    gone.wait()
    device = DeviceLock("cpu")
    with device.held("run b"):
        device.path.write_text(f'{{"pid": {gone.pid}, "what": "run a", "since": "then"}}')
        with pytest.raises(DeviceBusy, match="measured by another process already"):
            DeviceLock("cpu").check()
    for text in ("", "{", "[]", '{"pid": "x"}', f'{{"pid": {10**30}}}'):
        with device.held("run b"):
            device.path.write_text(text)
            with pytest.raises(DeviceBusy, match="another process"):
                DeviceLock("cpu").check()


def test_an_instant_of_another_is_waited_for(monkeypatch):
    """Whoever only checks the lock holds it for as long."""
    other = contextlib.ExitStack()
    other.enter_context(DeviceLock("cpu").held(""))
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: other.close())
    with DeviceLock("cpu").held("run b"):
        pass


def test_who_is_done_is_named_no_more():
    with DeviceLock("cpu").held("run a"):
        pass
    # Whoever comes next may not be allowed to write who it is.
    assert DeviceLock("cpu").path.read_text() == ""


def test_an_error_inside_gives_it_back():
    with pytest.raises(KeyError), DeviceLock("cpu").held("run a"):
        raise KeyError
    DeviceLock("cpu").check()


def test_everybody_may_lock_what_anybody_made(locks):
    before = os.umask(0o077)
    try:
        DeviceLock("cpu").check()
    finally:
        os.umask(before)
    assert DeviceLock("cpu").path.stat().st_mode & 0o777 == 0o666


def test_a_file_that_may_only_be_read_locks_all_the_same(locks, monkeypatch):
    device = DeviceLock("cpu")
    device.path.touch()
    real = os.open

    def as_another_user(path, flags, *rest, **more):
        if path == device.path and flags & (os.O_RDWR | os.O_CREAT):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", as_another_user)
    with device.held("run a"), pytest.raises(DeviceBusy, match="another process"):
        DeviceLock("cpu").check()


@pytest.mark.parametrize("trouble", ["no folder", "a link", "not to be read", "no locks"])
def test_where_no_lock_can_be_taken_a_line_says_so(locks, monkeypatch, capsys, trouble):
    device = DeviceLock("cpu")
    if trouble == "no folder":
        locks.rmdir()
    elif trouble == "a link":
        device.path.symlink_to(locks / "elsewhere")
    elif trouble == "not to be read":
        monkeypatch.setattr(os, "open", _refuse)
    else:
        monkeypatch.setattr("a2lib.measure.lock.fcntl", None)
    with device.held("run a"):
        said = capsys.readouterr().err
    assert said.startswith("this CPU is not locked against others: ") and said.count("\n") == 1
    assert not (locks / "elsewhere").exists()


def _refuse(*_, **__):
    raise PermissionError(13, "Permission denied")

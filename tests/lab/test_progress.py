"""What a terminal shows of a sweep: rows, the time they took, the time that is left."""

import fcntl
import os
import pty
import re
import struct
import termios

import pytest
from notebook_runs import shown_on

from a2lib.lab import progress
from a2lib.paths import TERMINAL


@pytest.fixture
def terminal(monkeypatch):
    """``terminal(columns)``: one of that width; called again it gives what was shown."""
    leader, follower = pty.openpty()
    monkeypatch.setenv(TERMINAL, os.ttyname(follower))

    def shown(columns=None):
        if columns is None:
            os.close(follower)
            return shown_on(leader)
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    return shown


@pytest.mark.parametrize("columns", [40, 200])
def test_rows_and_time_in_one_line_that_is_replaced_in_place(terminal, columns, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0)
    terminal(columns)
    bar = progress.Progress(4, "flash")
    for _ in range(4):
        bar.say("eager fp32 1 1 65536 64 True forward, " * 4)
        bar.advance()
    bar.close()
    states = terminal().strip().split("\r")
    assert len(states) > 4
    assert max(map(len, states)) < min(columns, 101)  # at the edge it would go on in the next
    if columns > 40:
        assert re.search(r"flash: 4/4 rows, \d:\d\d *$", states[-1])


@pytest.fixture
def at(monkeypatch):
    """``at(seconds)``: the time is so much behind the bar's begin."""

    def set_time(seconds):
        monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0 + seconds)

    set_time(0)
    return set_time


def test_what_failed_is_named_and_says_nothing_of_the_time_left(at):
    bar = progress.Progress(6, "flash")
    assert bar._line() == "flash: 0/6 rows, 0:00"
    bar.advance(2, "oom")
    bar.advance(0, "error")
    assert bar._line() == "flash: 2/6 rows, 2 oom, 0:00"
    at(30)
    bar.advance()
    assert bar._line() == "flash: 3/6 rows, 2 oom, 0:30, 1:30 left"
    at(60)  # and nothing came
    assert bar._line() == "flash: 3/6 rows, 2 oom, 1:00, 3:00 left"
    bar.advance(3, "error")
    assert bar._line() == "flash: 6/6 rows, 2 oom, 3 error, 1:00"

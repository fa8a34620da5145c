"""Calls without pause, by the second: on a train of calls whose time the test says."""

import pytest

from a2lib.lab import sustained
from a2lib.lab.sustained import seconds_of


class FakeTrain:
    """``lasts(at)`` is how long a call takes that begins ``at`` ms; the flush takes nothing."""

    def __init__(self, lasts):
        self.lasts = lasts
        self.now, self.log, self.waiting = 0.0, [], 0

    def begin(self):
        assert not self.waiting
        self.now = 0.0
        self.log.append("begin")

    def queue(self, call, n):
        self.waiting += 1
        self.log.append(n)
        done = []
        for _ in range(n):
            call()
            done.append((self.now, self.lasts(self.now)))
            self.now += done[-1][1]
        return done

    def finish(self, batch):
        self.waiting -= 1
        self.at = batch[-1][0]
        return batch

    def readings(self):
        assert self.waiting, "the device would have been idle"
        return int(2000 - self.at / 10), 500.0


SECONDS = {"device": "cpu", "second_s": 1.0}


def test_each_second_has_the_calls_that_began_in_it(monkeypatch):
    monkeypatch.setattr(sustained.time, "sleep", lambda s: train.log.append(f"rest {s}"))
    calls = []
    train = FakeTrain(lambda at: 4.0 if at < 1000 else 8.0)
    seconds = seconds_of(lambda: calls.append(1), n_seconds=3, idle_s=2.0, clock=train, **SECONDS)
    assert train.log[:4] == ["begin", 3, "rest 2.0", "begin"] and not train.waiting
    assert [s.second for s in seconds] == [0, 1, 2]
    assert [s.timing.ms for s in seconds] == [4.0, 8.0, 8.0]
    assert [s.timing.n for s in seconds] == [250, 125, 125]
    assert [s.timing.ms_mean for s in seconds] == [4.0, 8.0, 8.0]
    # Read at the end of the batches of that second, so the clock of this device falls.
    first, second, third = (s.timing.sm_mhz for s in seconds)
    assert 1900 < first < 2000 and 1800 < second < 1900 and 1700 < third < 1800
    assert {s.power_w for s in seconds} == {500.0}
    # A batch is about as long as it should be, and two of them fit the launch queue.
    assert set(train.log[4:]) == {12} and len(calls) == 3 + 12 * (len(train.log) - 4)


def test_a_second_in_which_no_call_began_is_left_out():
    train = FakeTrain(lambda at: 1500.0)
    seconds = seconds_of(lambda: None, n_seconds=4, idle_s=0.0, clock=train, **SECONDS)
    assert [s.second for s in seconds] == [0, 1, 3]


def test_on_the_cpu_a_second_is_what_it_is_said_to_be():
    calls = []
    short = SECONDS | {"second_s": 0.005}
    seconds = seconds_of(lambda: calls.append(1), n_seconds=3, idle_s=0.0, **short)
    assert seconds[0].second == 0 and seconds[0].power_w is None
    assert 0 < sum(s.timing.n for s in seconds) <= len(calls)
    assert all(s.timing.ms > 0 for s in seconds)
    with pytest.raises(ZeroDivisionError):
        seconds_of(lambda: 1 / 0, n_seconds=1, idle_s=0.0, **SECONDS)

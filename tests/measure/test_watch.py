"""The thread that reads the sensors beside a measurement."""

import itertools

from a2lib.measure import watch


def test_a_watch_ends_and_has_what_it_read(monkeypatch):
    class Sensors:
        cap = itertools.cycle([True, False, False, False])

        def sm_mhz(self):
            return 1500

        def power_w(self):
            return 300.0

        def capped(self):
            asked.append(next(self.cap))
            if len(asked) == 4:
                seen.set()
            return asked[-1] if len(asked) <= 4 else None

    asked, seen = [], watch.threading.Event()
    monkeypatch.setattr(watch, "Sensors", Sensors)
    monkeypatch.setattr(watch, "READ_EVERY_S", 0.001)
    with watch.Watch() as reader:
        assert seen.wait(30)
    assert not reader._thread.is_alive()
    assert set(reader.mhz) == {1500} and reader.power_w() == 300.0
    assert reader.capped_percent() == 25
    unread = watch.Watch()
    assert unread.power_w() is None and unread.capped_percent() is None


def test_sensors_that_tell_nothing_leave_nothing(monkeypatch):
    class Sensors:
        def sm_mhz(self):
            return None

        def power_w(self):
            return None

        def capped(self):
            seen.set()

    seen = watch.threading.Event()
    monkeypatch.setattr(watch, "Sensors", Sensors)
    monkeypatch.setattr(watch, "READ_EVERY_S", 0.001)
    with watch.Watch() as reader:
        assert seen.wait(30)
    assert set(reader.mhz) == {None}
    assert reader.power_w() is None and reader.capped_percent() is None

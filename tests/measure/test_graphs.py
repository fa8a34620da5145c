"""Replays in turns, on a clock and graphs whose calls take what the test says; CUDA's own have
tests/gpu/test_timing.py."""

import types

import pytest
from measure.test_timing import FakeClock

from a2lib.measure import Timing, graphs
from a2lib.measure.graphs import Unusable


class FakeGraphs:
    def __init__(self, unusable=False):
        self.log, self.unusable, self.alive = [], unusable, set()

    def capture(self, make, calls):
        call = make()
        self.log.append((call.name, calls))
        for _ in range(calls + 1):
            call()
        self.alive.add(call.name)
        return types.SimpleNamespace(replay=call, release=lambda: self.alive.discard(call.name))

    def mend(self):
        self.log.append("mend")
        if self.unusable:
            raise Unusable("gone")


def maker(name, *results):
    """A maker of a call that gives these milliseconds, or raises them, the last from there on."""

    def make():
        left = list(results)

        def call():
            result = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(result, Exception):
                raise result
            return result

        call.name = name
        return call

    return make


def measure(*makers, due=20, expected=1.0, unusable=False):
    made = {make().name: make for make in makers}
    fake, clock = FakeGraphs(unusable), FakeClock()
    expected_ms = dict.fromkeys(made, expected)
    done = graphs.time_replays(made, expected_ms, max_n=due, graphs=fake, clock=clock)
    assert not fake.alive and clock.released
    return done, fake, clock


def test_all_are_captured_and_then_replayed_in_turns():
    done, fake, clock = measure(maker("a", 1.0), maker("b", 2.0))
    assert done.usable and list(done.results) == ["a", "b"]
    assert done.results == {"a": Timing(1.0, 1.0, 1.0, 20), "b": Timing(2.0, 2.0, 2.0, 20)}
    assert fake.log == [("a", 2), ("b", 2)]
    turns = [tuple((fn.name, n) for fn, n in clock.log[i : i + 2]) for i in range(0, 20, 2)]
    # Neither always comes behind the other.
    assert set(turns) == {(("a", 2), ("b", 2)), (("b", 2), ("a", 2))}
    # A long call is run once before its capture.
    assert measure(maker("a", 1.0), expected=graphs.SHORT_MS)[1].log == [("a", 1)]


def test_as_many_samples_are_taken_as_fit():
    times = {"short": 0.01, "middle": 10.0, "long": 3000.0}
    made = {name: maker(name, 1.0) for name in times}
    done = graphs.time_replays(made, times, graphs=FakeGraphs(), clock=FakeClock())
    counts = [done.results[name].n for name in times]
    assert counts == [graphs.MAX_N, graphs.REP_MS / 10, graphs.MIN_N]


@pytest.mark.parametrize("at", [0, 2, 3, 10])
def test_a_failure_is_its_own_and_the_rest_go_on(at):
    error = MemoryError("out of memory")
    done, fake, _ = measure(maker("a", 1.0), maker("b", *[2.0] * at, error), maker("c", 3.0))
    assert done.usable and done.results["b"] is error and error.__traceback__ is None
    assert done.results["a"].n == done.results["c"].n == 20
    assert fake.log.count("mend") == 1


@pytest.mark.parametrize("at", [0, 3])
def test_an_unusable_device_ends_it_and_names_the_culprit_alone(at):
    error = RuntimeError("illegal memory access")
    makers = maker("a", 1.0), maker("b", *[2.0] * at, error), maker("c", 3.0)
    done, _, _ = measure(*makers, unusable=True)
    assert not done.usable and list(done.results) == ["b"]

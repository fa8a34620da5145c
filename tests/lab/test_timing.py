"""The policy of timing, of calls and of replays in turns, on a clock (and graphs) whose calls take
what the test says, and the clocks themselves; CUDA's own graphs have tests/gpu/test_timing.py.

No test asserts how long anything really took.
"""

import contextlib
import gc
import math
import statistics
import types
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from a2lib.lab import SECTIONS, Timing, graphs, time_call, time_many, timing
from a2lib.lab.failures import LostContext
from a2lib.lab.timing import RankTimes

POLICY = {"warmup_ms": 25, "rep_ms": 100, "min_n": 3, "max_n": 500}


class FakeClock:
    """A function is a callable that returns how many milliseconds its call took."""

    sm_mhz = None

    def __init__(self):
        self.log = []
        self.released = 0

    def host(self, fn, n):
        return None

    def samples(self, fn, n):
        self.log.append((fn, n))
        return [fn() for _ in range(n)]

    def release(self):
        self.released += 1


def takes(*milliseconds):
    """A function whose calls take these milliseconds, or raise them, the last from there on."""
    left = list(milliseconds)

    def fn():
        fn.calls += 1
        result = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(result, Exception):
            raise result
        return result

    fn.calls = 0
    return fn


def measure(functions, **policy):
    clock = FakeClock()
    return time_many(functions, device="cpu", clock=clock, **POLICY | policy), clock


@example([7.851685])
@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=50))
def test_the_summary_is_the_median_and_the_quantiles(samples):
    summary = Timing.from_samples(samples)
    assert summary.n == len(samples)
    assert math.isclose(summary.ms, statistics.median(samples), rel_tol=1e-9)
    assert min(samples) <= summary.ms_p20 <= summary.ms <= summary.ms_p80 <= max(samples)
    assert Timing.from_samples([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == Timing(3.5, 2.0, 5.0, 6)


@pytest.mark.parametrize(("ms", "bounds", "calls", "n"), [
    (4000, {}, 4, 3),  # one to warm up, then the samples
    (10, {}, 1 + 1 + 2 + 10, 10),
    (1, {}, 1 + 1 + 25 + 100, 100),
    (0.001, {}, 1 + 1 + 500 + 500, 500),
    (5000, {"min_n": 7, "max_n": 9}, 8, 7),
])  # fmt: skip
def test_short_calls_are_repeated_often_and_long_ones_seldom(ms, bounds, calls, n):
    fn = takes(ms)
    results, _ = measure({"fn": fn}, **bounds)
    assert results["fn"] == Timing(ms, ms, ms, n)
    assert fn.calls == calls


def test_samples_are_taken_in_turns():
    fast, slow, middle = takes(1), takes(4000), takes(20)
    results, clock = measure({"fast": fast, "slow": slow, "middle": middle})
    assert (results["fast"].n, results["slow"].n, results["middle"].n) == (100, 3, 5)
    letters, order = {fast: "f", middle: "m", slow: "s"}, ""
    for fn, n in clock.log[3 + 2 + 3 :]:
        assert n == (10 if fn is fast else 1)
        order += letters[fn]
    assert Counter(order) == {"f": 10, "m": 5, "s": 2}
    # Between any two turns of a slow function the fast one had its own.
    assert "mm" not in order and "ss" not in order


@pytest.mark.parametrize("refuses", [False, True])
def test_one_failure_is_its_own_and_the_rest_go_on(monkeypatch, refuses):
    def broken():
        raise RuntimeError("not on this device")

    def release(clock):
        clock.released += 1
        if refuses:  # a device broken by the call
            broken()

    monkeypatch.setattr(FakeClock, "release", release)
    fails_late = iter([1.0] * 40)
    results, clock = measure(
        {"good": takes(10), "broken": broken, "late": lambda: next(fails_late), "last": takes(10)}
    )
    assert results["good"].n == results["last"].n == 10
    assert isinstance(results["broken"], RuntimeError)
    assert isinstance(results["late"], StopIteration)
    assert list(results) == ["good", "broken", "late", "last"]
    assert clock.released == 2
    assert "in broken" in results["broken"].__notes__[0]


def test_a_failed_call_keeps_nothing_alive():
    class Tensor:
        pass

    alive = []

    def out_of_memory():
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise MemoryError("out of memory") from inner

    gc.disable()
    try:
        results, _ = measure({"fn": out_of_memory})
        assert isinstance(results["fn"], MemoryError)
        [reference] = alive
        assert reference() is None
    finally:
        gc.enable()


def test_on_the_cpu_every_sample_is_one_call():
    calls = []
    result = time_call(lambda: calls.append(1), device="cpu", rep_ms=1, min_n=4, max_n=8)
    assert 4 <= result.n <= 8 and len(calls) >= result.n + 2
    assert 0 < result.ms_p20 <= result.ms <= result.ms_p80
    with pytest.raises(ZeroDivisionError):
        time_call(lambda: 1 / 0, device="cpu")


def test_the_gpu_clock_flushes_outside_of_the_events(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing, external):
            assert enable_timing and not external

        def record(self):
            self.at = len(log)
            log.append("event")

        def elapsed_time(self, end):
            assert log[-1] == "synchronize"
            return end.at - self.at

    flush = types.SimpleNamespace(zero_=lambda: log.append("flush"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch, "empty", lambda *size, **options: flush)
    monkeypatch.setattr(
        timing, "Sensors", lambda: types.SimpleNamespace(sm_mhz=lambda: log.append("clock") or 1980)
    )
    clock = timing.Clock("cuda")
    assert clock.samples(lambda: log.append("call"), 2) == [2, 2]
    # The clock is read while the queue is being worked off.
    assert log == ["flush", "event", "call", "event"] * 2 + ["clock", "synchronize"]
    assert clock.sm_mhz == 1980
    log.clear()
    ticks = iter((5_000_000, 11_000_000))  # ns before the first call and after the last
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter_ns=lambda: next(ticks)))
    assert clock.host(lambda: log.append("call"), 3) == 2.0
    assert log == ["synchronize", *["call"] * 3, "synchronize"]


def test_of_ranks_the_slowest_counts_in_each_call():
    taken = RankTimes([[1.0, 2.0, 9.0], [3.0, 1.0, 4.0]], ms_host=0.5)
    row = taken.row(SECTIONS["ddp"])
    assert (row["ms"], row["n"], row["ms_host"]) == (3.0, 3, 0.5)  # of 3, 2 and 9
    ranks = row["ms_rank_min"], row["ms_rank_median"], row["ms_rank_max"]
    assert ranks == (2.0, 2.5, 3.0)
    expected = {"ms_without": 3.0, "ms_without_p20": 2.4, "ms_without_p80": 6.6}
    assert taken.slowest.named("ms_without") == pytest.approx(expected)


class FakeGraphs:
    def __init__(self):
        self.log, self.alive = [], set()

    def capture(self, make, calls):
        call = make()
        self.log.append((call.name, calls))
        for _ in range(calls + 1):
            call()
        self.alive.add(call.name)
        return types.SimpleNamespace(replay=call, release=lambda: self.alive.discard(call.name))


def maker(name, *milliseconds):
    def make():
        call = takes(*milliseconds)
        call.name = name
        return call

    return make


def replay(makers, expected=1.0):
    fake, clock = FakeGraphs(), FakeClock()
    expected_ms = dict.fromkeys(makers, expected)
    done = graphs.time_replays(makers, expected_ms, max_n=20, graphs=fake, clock=clock)
    assert not fake.alive and clock.released
    return done, fake, clock


def test_all_are_captured_and_then_replayed_in_turns():
    done, fake, clock = replay({"a": maker("a", 1.0), "b": maker("b", 2.0)})
    assert list(done) == ["a", "b"]
    assert done == {"a": Timing(1.0, 1.0, 1.0, 20), "b": Timing(2.0, 2.0, 2.0, 20)}
    assert fake.log == [("a", 2), ("b", 2)]
    turns = set()
    for (first, first_n), (second, second_n) in zip(clock.log[::2], clock.log[1::2], strict=True):
        assert first_n == second_n == 2
        turns.add(first.name + second.name)
    assert turns == {"ab", "ba"}  # neither always comes behind the other
    # A long call is run once before its capture.
    assert replay({"a": maker("a", 1.0)}, expected=graphs.SHORT_MS)[1].log == [("a", 1)]


@pytest.mark.parametrize("at", [0, 10])
def test_a_failure_of_a_capture_or_a_replay_names_the_call_and_ends_the_process(at):
    fails = maker("b", *[2.0] * at, MemoryError("out of memory"))
    with pytest.raises(LostContext) as caught:
        replay({"a": maker("a", 1.0), "b": fails, "c": maker("c", 3.0)})
    assert (caught.value.name, caught.value.columns) == ("b", {"note": "no graph: out of memory"})


def on_cpu(calls, device, **timing):
    return time_many(calls, device="cpu", **timing)


@pytest.mark.parametrize("lost", [None, graphs.NoGraph("b", RuntimeError("odd"))], ids=str)
def test_a_call_in_turns_has_the_time_of_its_graph_or_says_why_not(monkeypatch, lost):
    """On a "GPU" that is the CPU; behind a failed capture another process measures the others."""

    def time_replays(captured, expected_ms):
        assert captured.keys() == expected_ms.keys() and all(expected_ms.values())
        if lost:
            raise lost
        return dict.fromkeys(captured, Timing(0.25, 0.125, 0.5, 7))

    monkeypatch.setattr(graphs, "time_many", on_cpu)
    monkeypatch.setattr(graphs, "time_replays", time_replays)
    makers = dict.fromkeys("abc", lambda is_captured: lambda: sum(range(100)))
    quick = {"warmup_ms": 0, "rep_ms": 1, "min_n": 2, "max_n": 3}
    rows = {}
    with pytest.raises(LostContext) if lost else contextlib.nullcontext():
        for name, row in graphs.time_in_turns(makers, SECTIONS["flash"], device="cuda", **quick):
            rows[name] = row
    assert list(rows) == (["b"] if lost else ["a", "b", "c"])
    for row in rows.values():
        assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"]
        assert row.get("ms_graph") == (None if lost else 0.25)
    assert not lost or rows["b"]["note"] == "no graph: RuntimeError: odd"


@pytest.mark.gpu
def test_on_a_gpu_out_of_memory_is_a_result_and_frees_what_it_took(no_garbage):
    x = torch.randn(512, 512, device="cuda")

    def too_much():
        part = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        return part, torch.empty(2**50, dtype=torch.uint8, device="cuda")

    x @ x  # cuBLAS keeps a workspace from here on
    before = torch.cuda.memory_allocated()
    results = time_many({"oom": too_much, "matmul": lambda: x @ x})
    assert isinstance(results["oom"], torch.cuda.OutOfMemoryError)
    assert results["matmul"].n >= 3 and results["matmul"].ms > 0
    assert torch.cuda.memory_allocated() == before

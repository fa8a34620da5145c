"""The policy of timing on a clock whose calls take what the test says, and the clocks themselves.

No test asserts how long anything really took.
"""

import gc
import math
import statistics
import types
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from a2lib.measure import Timing, time_call, time_many, timing

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
    """A function whose calls take these milliseconds, the last of them from there on."""
    left = list(milliseconds)

    def fn():
        fn.calls += 1
        return left.pop(0) if len(left) > 1 else left[0]

    fn.calls = 0
    return fn


def measure(functions, **policy):
    clock = FakeClock()
    policy = POLICY | policy
    return timing._time_in_turns(clock, functions, *policy.values()), clock


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=50))
def test_the_summary_is_the_median_and_the_quantiles(samples):
    summary = Timing.of(samples)
    assert summary.n == len(samples)
    assert math.isclose(summary.ms, statistics.median(samples), rel_tol=1e-9)
    assert min(samples) <= summary.ms_p20 <= summary.ms <= summary.ms_p80 <= max(samples)


def test_quantiles_interpolate():
    assert Timing.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == Timing(3.5, 2.0, 5.0, 6)


@pytest.mark.parametrize(
    ("ms", "calls", "n"),
    [
        (4000, 4, 3),  # one to warm up, then the samples
        (999, 1 + 1 + 1 + 3, 3),
        (10, 1 + 1 + 2 + 10, 10),
        (1, 1 + 1 + 25 + 100, 100),
        (0.001, 1 + 1 + 500 + 500, 500),
        (0.0, 1 + 1 + 500 + 500, 500),
    ],
)
def test_short_calls_are_repeated_often_and_long_ones_seldom(ms, calls, n):
    fn = takes(ms)
    results, _ = measure({"fn": fn})
    assert results["fn"] == Timing(ms, ms, ms, n)
    assert fn.calls == calls


@pytest.mark.parametrize(
    ("min_n", "max_n", "n"), [(1, 1, 1), (7, 9, 7), (1, 500, 1), (200, 200, 200)]
)
def test_the_number_of_samples_stays_in_its_bounds(min_n, max_n, n):
    results, _ = measure({"fn": takes(5000)}, min_n=min_n, max_n=max_n)
    assert results["fn"].n == n


def test_compilation_is_in_no_sample():
    fn = takes(30_000, 700, 2, 2, 2, 1)
    results, _ = measure({"fn": fn})
    assert results["fn"].ms_p80 <= 2
    assert results["fn"].n == 50


def test_samples_are_taken_in_turns():
    fast, slow, middle = takes(1), takes(4000), takes(20)
    results, clock = measure({"fast": fast, "slow": slow, "middle": middle})
    assert [results[name].n for name in ("fast", "slow", "middle")] == [100, 3, 5]
    batches = [(fn, n) for fn, n in clock.log[3 + 2 + 3 :]]
    assert {n for fn, n in batches if fn is fast} == {10}
    assert {n for fn, n in batches if fn is not fast} == {1}
    order = "".join("fms"[[fast, middle, slow].index(fn)] for fn, _ in batches)
    assert [order.count(letter) for letter in "fms"] == [10, 5, 2]
    # Between any two turns of a slow function the fast one had its own.
    assert "mm" not in order and "ss" not in order


def test_one_failure_is_its_own_and_the_rest_go_on():
    def broken():
        raise RuntimeError("not on this device")

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


def test_a_device_broken_by_one_call_is_the_result_of_each(monkeypatch):
    def broken():
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(FakeClock, "release", lambda self: broken())
    results, _ = measure({"before": takes(10), "first": broken, "next": broken})
    assert results["before"].n == 10
    assert [str(results[name]) for name in ("first", "next")] == ["illegal memory access"] * 2


def test_after_a_failure_the_others_allocate_anew_outside_of_their_samples():
    def broken():
        raise MemoryError

    before, after = takes(*[10] * 4, 5000, 10), takes(10)
    results, _ = measure({"before": before, "broken": broken, "after": after})
    assert results["before"] == results["after"] == Timing(10, 10, 10, 10)
    assert (before.calls, after.calls) == (1 + 1 + 2 + 1 + 10, 1 + 1 + 2 + 10)


def test_an_interrupt_is_no_result():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time_many({"fn": interrupted}, device="cpu")


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
        assert [reference() for reference in alive] == [None]
    finally:
        gc.enable()


def test_on_the_cpu_every_sample_is_one_call():
    calls = []
    result = time_call(lambda: calls.append(1), device="cpu", rep_ms=1, min_n=4, max_n=8)
    assert 4 <= result.n <= 8
    assert 0 < result.ms_p20 <= result.ms <= result.ms_p80
    assert len(calls) >= result.n + 2


def test_time_call_passes_an_exception_on():
    with pytest.raises(ZeroDivisionError):
        time_call(lambda: 1 / 0, device="cpu")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "gpu"}, "device 'gpu': allowed are cuda, cpu"),
        ({"min_n": 0}, "allowed is 1 <= min_n <= max_n"),
        ({"min_n": 9, "max_n": 8}, "allowed is 1 <= min_n <= max_n"),
        ({"rep_ms": 0}, "rep_ms 0"),
        ({"rep_ms": math.nan}, "rep_ms nan"),
        ({"warmup_ms": -1}, "warmup_ms -1"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_before_a_call(wrong, message):
    calls = []
    with pytest.raises(ValueError, match=message):
        time_many({"fn": lambda: calls.append(1)}, **{"device": "cpu", **wrong})
    assert not calls


def test_without_cuda_the_gpu_clock_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device; allowed here is 'cpu'"):
        time_call(lambda: None)


def test_the_gpu_clock_flushes_outside_of_the_events(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

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
    clock = timing.CudaClock()
    assert clock.samples(lambda: log.append("call"), 2) == [2, 2]
    # The clock is read while the queue is being worked off.
    assert log == ["flush", "event", "call", "event"] * 2 + ["clock", "synchronize"]
    assert clock.sm_mhz == 1980
    log.clear()
    ticks = iter((5_000_000, 11_000_000))  # ns before the first call and after the last
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter_ns=lambda: next(ticks)))
    assert clock.host(lambda: log.append("call"), 3) == 2.0
    assert log == ["synchronize", *["call"] * 3, "synchronize"]


@pytest.mark.parametrize(
    "ms, calls, repetitions",
    [
        (0.0, 5, 9),
        (0.05, 5, 9),
        (2.0, 5, 6),
        (5.0, 2, 6),
        (10.0, 1, 6),
        (200.0, 1, 3),
        (timing.LONG_MS, 1, 1),
    ],
)
def test_the_host_is_timed_over_a_few_calls_and_fewer_long_ones(ms, calls, repetitions):
    assert timing.host_plan(ms) == (calls, repetitions)


def test_the_hosts_time_is_taken_after_the_samples_in_turns(monkeypatch):
    took = iter([9.0, 1.0, 3.0, 1.0, 5.0, 1.0] * 3)
    asked = []

    def host(self, fn, n):
        assert len(self.log) == logged
        asked.append((fn, n))
        return next(took)

    logged = measure({"a": takes(1), "b": takes(1)})[1].log.__len__()
    monkeypatch.setattr(FakeClock, "host", host)
    functions = {"a": takes(1), "b": takes(1)}
    results, _ = measure(functions)
    assert asked == [(functions["a"], 5), (functions["b"], 5)] * 9
    assert results["a"] == Timing(1, 1, 1, 100, ms_host=5.0)
    assert results["b"] == Timing(1, 1, 1, 100, ms_host=1.0)


def test_a_call_that_fails_when_the_host_is_timed_has_no_time(monkeypatch):
    def host(self, fn, n):
        if fn is bad:
            raise MemoryError
        return 0.5

    bad = takes(1)
    monkeypatch.setattr(FakeClock, "host", host)
    results, clock = measure({"good": takes(1), "bad": bad})
    assert isinstance(results["bad"], MemoryError) and clock.released == 1
    assert results["good"].ms_host == 0.5


def test_the_clock_is_the_median_of_the_readings_that_succeeded(monkeypatch):
    assert timing.median_reading([None, None]) is None
    assert timing.median_reading([1, None, 2, 9]) == 2
    readings = [None, 1900, 1910, 1920, None, 1930, 1940, 1950, 1960, 1970]
    left = list(readings)
    monkeypatch.setattr(FakeClock, "sm_mhz", property(lambda self: left.pop(0)))
    results, _ = measure({"fn": takes(1)})
    assert not left and results["fn"].sm_mhz == timing.median_reading(readings)


def test_a_long_call_keeps_the_reading_of_its_first_sample(monkeypatch):
    left = [1500, 1600, 1700]
    monkeypatch.setattr(FakeClock, "sm_mhz", property(lambda self: left.pop(0)))
    results, _ = measure({"fn": takes(timing.LONG_MS)})
    assert not left and results["fn"].sm_mhz == 1600


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

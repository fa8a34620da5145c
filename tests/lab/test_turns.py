"""Calls in turns on a stand-in for a GPU: a graph's time, or why there is none."""

import pytest
import torch

from a2lib.lab import SECTIONS, Timing, failures, graphs

QUICK = {"warmup_ms": 0, "rep_ms": 1, "min_n": 2, "max_n": 3}
REPLAYED = Timing(0.25, 0.125, 0.5, 7)
LOST = RuntimeError("CUDA error: an illegal memory access")


def make(is_captured):
    return lambda: sum(range(100))


def raising(error):
    def call():
        raise error

    return lambda is_captured: call


@pytest.fixture
def time(monkeypatch):
    """``time(makers, error)``: the rows on a "GPU" that is the CPU, whose replays raise the error
    if there is one; those too before it raises, then ``time.raised`` is what."""
    time_many = graphs.time_many
    monkeypatch.setattr(
        graphs,
        "time_many",
        lambda calls, device, **timing: time_many(calls, device="cpu", **timing),
    )

    def measure(makers, error=None):
        def time_replays(captured, expected_ms):
            assert captured.keys() == expected_ms.keys() and all(expected_ms.values())
            for call in captured.values():
                call()()
            if error:
                raise error
            return dict.fromkeys(captured, REPLAYED)

        monkeypatch.setattr(graphs, "time_replays", time_replays)
        rows, measure.raised = {}, None
        try:
            for name, row in graphs.time_in_turns(
                makers, SECTIONS["flash"], device="cuda", **QUICK
            ):
                rows[name] = row
        except failures.LostContext as lost:
            measure.raised = lost
        return rows

    return measure


def test_each_has_a_time_of_the_host_and_of_its_graph(time):
    rows = time({"a": make, "b": make})
    assert list(rows) == ["a", "b"] and not time.raised
    for row in rows.values():
        assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"] and row["ms_graph"] == 0.25


def test_on_a_cpu_there_is_no_graph():
    rows = dict(graphs.time_in_turns({"a": make}, SECTIONS["flash"], device="cpu", **QUICK))
    assert rows["a"]["ms"] > 0 and "ms_graph" not in rows["a"]


def test_what_fails_is_a_row_and_the_others_are_timed(time):
    def cannot(is_captured):
        raise torch.OutOfMemoryError("CUDA out of memory")

    rows = time({"cannot": cannot, "late": raising(ValueError("odd")), "good": make})
    assert rows["cannot"] == {"status": "oom", "note": "out of memory"}
    assert rows["late"] == {"status": "error", "note": "ValueError: odd"}
    assert rows["good"]["ms_graph"] == 0.25


def test_what_cannot_be_captured_keeps_its_time_and_the_rest_is_measured_elsewhere(time):
    lost = graphs.NoGraph("b", RuntimeError("x" * 1000))
    rows = time({"a": make, "b": make, "c": make}, lost)
    assert list(rows) == ["b"] and time.raised is lost
    assert rows["b"]["ms"] > 0 and "ms_graph" not in rows["b"]
    assert rows["b"]["note"] == "no graph: RuntimeError: " + "x" * 173 + "..."


def test_a_device_lost_in_turns_blames_nobody(time):
    assert not time({"late": raising(LOST), "good": make}) and time.raised

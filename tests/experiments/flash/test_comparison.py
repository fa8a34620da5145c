"""One shape: every outcome is a row, and nothing wrong gets a time."""

import dataclasses
import math
from unittest.mock import Mock

import pytest
import torch

from a2lib.attention import attention_reference
from a2lib.experiments.flash import comparison, peers, turns
from a2lib.experiments.flash.shapes import Shape
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.harness.worker import Job
from a2lib.measure import failures, memory
from a2lib.theory.attention import PASSES

SHAPE = Shape("fp32", 1, 2, 40, 16, True)
QUICK = {"warmup_ms": 0, "rep_ms": 1, "min_n": 2, "max_n": 3}


def good(q, k, v):
    return attention_reference(q, k, v, True)


def raising(error):
    return Mock(side_effect=error)


def failing_late(error):
    """Right twice, in its check; it raises where it is timed."""
    calls = []

    def forward(q, k, v):
        calls.append(1)
        if len(calls) > 2:
            raise error
        return good(q, k, v)

    return forward


class BackwardFails(torch.autograd.Function):
    """Right forwards; its backward raises or returns what the class attribute says."""

    result = staticmethod(lambda do: (do, do, do))

    @staticmethod
    def forward(ctx, q, k, v):
        return good(q, k, v)

    @staticmethod
    def backward(ctx, do):
        return BackwardFails.result(do)


def task(names, passes=PASSES, in_turns=True):
    rows = {name: tuple(SHAPE.key(name, pass_) for pass_ in passes) for name in names}
    return Task("", {"shape": dataclasses.asdict(SHAPE)}, rows, in_turns)


@pytest.fixture
def compare(put, monkeypatch):
    """``compare(name=forward, ...)`` measures fakes: {(name, pass): row}, and who was begun."""
    monkeypatch.setitem(turns.TIMING, "cpu", QUICK)

    def measure(passes=PASSES, in_turns=True, **forwards):
        monkeypatch.setattr(peers, "check", lambda name, device: None)
        monkeypatch.setattr(peers, "build", lambda name, shape, device: forwards[name])
        stored = put(comparison.measure, task(forwards, passes, in_turns))
        rows = {(row["implementation"], row["pass"]): row for row in stored}
        assert len(rows) == len(stored), "a row was stored twice"
        if put.raised:
            assert isinstance(put.raised, failures.LostContext)
            put.begun.append("lost")
        return rows, put.begun

    return measure


def statuses(rows, name):
    return [rows[name, p]["status"] for p in PASSES if (name, p) in rows]


def test_times_are_positive_and_in_order(compare):
    rows, begun = compare(good=good, twin=good)
    assert len(rows) == 6
    for row in rows.values():
        assert row["status"] == "ok" and row["n"] >= 2 and row["peak_bytes"] is None
        assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"] < math.inf
        # The host does the work itself here.
        assert row["ms_host"] is row["sm_mhz"] is None and "ms_graph" not in row
        assert row["note"] == ""
    assert begun == ["good", "twin", None, None, None]
    assert compare(good=good, twin=good, in_turns=False)[1] == ["good", "twin"] * 4


def test_an_exception_is_a_row_and_the_others_go_on(compare):
    rows, _ = compare(bad=raising(torch.OutOfMemoryError("CUDA out of memory")), good=good)
    assert statuses(rows, "bad") == ["oom"] * 3 and statuses(rows, "good") == ["ok"] * 3
    assert all(rows["bad", p]["note"] and "ms" not in rows["bad", p] for p in PASSES)


def test_a_wrong_output_gets_no_time(compare):
    rows, _ = compare(unmasked=lambda q, k, v: attention_reference(q, k, v, False), good=good)
    assert statuses(rows, "unmasked") == ["error"] * 3
    assert rows["unmasked", "forward"]["note"].startswith("WrongResult: wrong o")


@pytest.mark.parametrize("result, status, word", [
    (lambda do: (do, do, do), "error", "wrong dq"),
    (lambda do: (do * float("nan"),) * 3, "error", "not finite"),
    (raising(torch.OutOfMemoryError("CUDA out of memory")), "oom", "out of memory"),
])  # fmt: skip
def test_a_backward_that_fails_leaves_the_forward(compare, monkeypatch, result, status, word):
    monkeypatch.setattr(BackwardFails, "result", staticmethod(result))
    rows, _ = compare(bad=BackwardFails.apply)
    assert statuses(rows, "bad") == ["ok", status, status]
    assert word in rows["bad", "backward"]["note"]


def test_failing_while_timed_is_a_row(compare):
    late = failing_late(torch.OutOfMemoryError("CUDA out of memory"))
    rows, _ = compare(late=late, good=good)
    assert statuses(rows, "late") == ["oom"] * 3 and statuses(rows, "good") == ["ok"] * 3


def test_what_cannot_fit_the_cpu_is_not_run(compare, monkeypatch):
    def host_bytes(name, shape, pass_):
        return 2 if name == "eager" and pass_ != "forward" else 1

    monkeypatch.setattr(peers, "host_bytes", host_bytes)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1)
    rows, _ = compare(eager=good, sdpa_flash=good)
    assert statuses(rows, "eager") == ["ok", "oom", "oom"]
    assert "not tried: needs" in rows["eager", "backward"]["note"]
    assert statuses(rows, "sdpa_flash") == ["ok"] * 3


def test_a_device_lost_while_taking_turns_blames_nobody(compare):
    lost = RuntimeError("CUDA error: an illegal memory access")
    rows, begun = compare(late=failing_late(lost), good=good)
    assert not rows and begun == ["late", "good", None, "lost"]
    rows, begun = compare(late=failing_late(lost), good=good, in_turns=False)
    assert statuses(rows, "late") == ["error"] * 3 and begun[-2:] == ["late", "lost"]


def test_an_expired_limit_finishes_what_was_started(compare, monkeypatch):
    asked = []
    monkeypatch.setattr(Job, "expired", lambda job: asked.append(1) or len(asked) > 1)
    rows, begun = compare(one=good, two=good, three=good)
    assert {name for name, _ in rows} == {"one"} and statuses(rows, "one") == ["ok"] * 3


def test_forward_alone_runs_no_backward(compare, monkeypatch):
    monkeypatch.setattr(BackwardFails, "result", staticmethod(raising(AssertionError("ran"))))
    rows, _ = compare(only=BackwardFails.apply, passes=("forward",))
    assert list(rows) == [("only", "forward")] and rows["only", "forward"]["status"] == "ok"

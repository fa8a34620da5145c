"""Which counted kernel belongs to which call, and what becomes of those that are not counted."""

import json

import pytest

from a2lib.experiments.flash import counting
from a2lib.experiments.flash.shapes import Parameters
from a2lib.experiments.harness.sweep import Task
from a2lib.lab import nsight
from a2lib.lab.program import ProgramError


def kernel(name, **values):
    shares = dict.fromkeys(nsight.METRICS, 1)
    return {"kernel": name, **shares, **values}


MARK = kernel(f"at::native::{counting.MARKER}(long)")
(TASK,) = counting.tasks(Parameters(sweep="leaderboard", implementations="a2lib"), "cuda")[:1]
CALLS = [("a2lib", "forward"), ("a2lib", "backward"), ("sdpa_cudnn", "forward")]
LIKE = TASK.keys[0]
CALLED = Task.whole("", TASK.spec, [{**LIKE, "implementation": n, "pass": p} for n, p in CALLS])


@pytest.fixture
def counted(monkeypatch):
    """Let the counters read the kernels given; returns the calls that were asked for."""
    asked = []

    def give(kernels):
        def read(command, *, timeout_s):
            asked.append(json.loads(command[-1]))
            if isinstance(kernels, Exception):
                raise kernels
            return kernels

        monkeypatch.setattr(nsight, "counted", read)
        return asked

    return give


def test_each_call_has_the_kernels_behind_its_marker(put, counted):
    asked = counted([MARK, kernel("a", device_bytes=7), MARK, kernel("b"), kernel("c"), MARK])
    rows = put(counting.measure, CALLED, "cuda")
    assert [(r["implementation"], r["pass"], r["launch"], r.get("kernel")) for r in rows] == [
        (*CALLS[0], 0, "a"),
        (*CALLS[1], 0, "b"),
        (*CALLS[1], 1, "c"),
        (*CALLS[2], 0, None),
    ]
    assert rows[0]["device_bytes"] == 7
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "unsupported"]
    assert asked[0]["calls"] == [list(call) for call in CALLS]
    assert asked[0]["shape"]["seq_len"] == rows[0]["seq_len"]


@pytest.mark.parametrize("kernels", [ProgramError("ncu is refused it"), [MARK, kernel("a")]])
def test_what_was_not_counted_is_a_row_with_the_reason(put, counted, kernels):
    counted(kernels)
    rows = put(counting.measure, CALLED, "cuda")
    assert [row["status"] for row in rows] == ["unsupported"] * 3
    assert all(row["note"] for row in rows)

"""Which counted kernel belongs to which call, and what becomes of those that are not counted."""

import json

import pytest

from a2lib.experiments import counting
from a2lib.experiments.counted import MARKER
from a2lib.measure import counters


def kernel(name, **values):
    shares = dict.fromkeys(counters.METRICS, 1)
    return {"kernel": name, **shares, **values}


MARK = kernel(f"at::native::{MARKER}(long)")
CALLS = counting.calls()[:3]


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

        monkeypatch.setattr(counters, "read", read)
        return asked

    return give


def test_each_call_has_the_kernels_behind_its_marker(counted):
    asked = counted([MARK, kernel("a", device_bytes=7), MARK, kernel("b"), kernel("c"), MARK])
    rows = list(counting.measure(CALLS, "cuda"))
    assert [(r["implementation"], r["pass"], r["launch"], r.get("kernel")) for r in rows] == [
        (CALLS[0][0], CALLS[0][1], 0, "a"),
        (CALLS[1][0], CALLS[1][1], 0, "b"),
        (CALLS[1][0], CALLS[1][1], 1, "c"),
        (CALLS[2][0], CALLS[2][1], 0, None),
    ]
    assert rows[0]["device_bytes"] == 7
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "unsupported"]
    assert [call[:2] for call in asked[0]] == [list(call[:2]) for call in CALLS]


@pytest.mark.parametrize(
    "kernels",
    [counters.CountersError("ncu is refused the counters"), [], [MARK, kernel("a")]],
    ids=["refused", "nothing", "a call short"],
)
def test_what_was_not_counted_is_a_row_with_the_reason(counted, kernels):
    counted(kernels)
    rows = list(counting.measure(CALLS, "cuda"))
    assert [row["status"] for row in rows] == ["unsupported"] * 3
    assert all(row["note"] for row in rows)


def test_a_cpu_has_no_counters():
    rows = list(counting.measure(CALLS, "cpu"))
    assert {row["status"] for row in rows} == {"unsupported"}
    assert "GPU" in rows[0]["note"]

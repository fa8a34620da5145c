"""One shape: every outcome is a row, and nothing wrong gets a time; on a CPU, on a stand-in for a
GPU anywhere, and on the GPU itself."""

import dataclasses
import math
from unittest.mock import Mock

import pytest
import torch

from a2lib.attention import attention_reference
from a2lib.experiments.flash import comparison, peers, turns
from a2lib.experiments.flash.shapes import ASKED, PUBLISHED, Shape
from a2lib.experiments.harness.sweep import Sweep, Task
from a2lib.experiments.harness.worker import Job
from a2lib.lab import FLASH, Store, Timing, failures, graphs, memory, start_run, timing
from a2lib.lab.graphs import Replays
from a2lib.theory.attention import PASSES

SHAPE = Shape("fp32", 1, 2, 40, 16, True)
QUICK = {"warmup_ms": 0, "rep_ms": 1, "min_n": 2, "max_n": 3}
REPLAYED = Timing(0.25, 0.125, 0.5, 7)
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


def good(q, k, v):
    return attention_reference(q, k, v, True)


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


def task(names, passes=PASSES, in_turns=True, shape=SHAPE):
    rows = {name: tuple(shape.key(name, pass_) for pass_ in passes) for name in names}
    return Task("", {"shape": dataclasses.asdict(shape)}, rows, in_turns)


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
        assert row["status"] == "ok" and row["n"] >= 2 and "peak_bytes" not in row
        assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"] < math.inf
        # The host does the work itself here.
        assert row["ms_host"] is row["sm_mhz"] is None and "ms_graph" not in row
        assert row["note"] == ""
    assert begun == ["good", "twin", None, None, None]
    assert compare(good=good, twin=good, in_turns=False)[1] == ["good", "twin"] * 4


def test_what_fails_or_is_wrong_has_no_time_and_the_others_go_on(compare):
    for bad, status, note in (
        (Mock(side_effect=OUT_OF_MEMORY), "oom", "out of memory"),
        (failing_late(OUT_OF_MEMORY), "oom", "out of memory"),
        (lambda q, k, v: attention_reference(q, k, v, False), "error", "WrongResult: wrong o"),
    ):
        rows, _ = compare(bad=bad, good=good)
        assert statuses(rows, "bad") == [status] * 3 and statuses(rows, "good") == ["ok"] * 3
        of_bad = [rows["bad", p] for p in PASSES]
        assert all(row["note"].startswith(note) and "ms" not in row for row in of_bad)


def test_a_backward_that_fails_leaves_the_forward(compare, monkeypatch):
    rows, _ = compare(bad=BackwardFails.apply)
    assert statuses(rows, "bad") == ["ok", "error", "error"]
    assert "wrong dq" in rows["bad", "backward"]["note"]
    monkeypatch.setattr(BackwardFails, "result", Mock(side_effect=OUT_OF_MEMORY))
    rows, _ = compare(bad=BackwardFails.apply)
    assert statuses(rows, "bad") == ["ok", "oom", "oom"]


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
    monkeypatch.setattr(BackwardFails, "result", Mock(side_effect=AssertionError("ran")))
    rows, _ = compare(only=BackwardFails.apply, passes=("forward",))
    assert list(rows) == [("only", "forward")] and rows["only", "forward"]["status"] == "ok"


def test_our_kernels_compile_once_for_all_lengths():
    shapes = [Shape("bf16", 1, 1, 2**n, 64, True) for n in range(7, 15)]
    names = ("a2lib", "eager", "flex", "compile")
    tasks = comparison.compilations(dict.fromkeys(shapes, names))
    found = [task.spec["implementation"] for task in tasks]
    assert {name: found.count(name) for name in found} == {"a2lib": 1, "flex": 8, "compile": 8}


@pytest.fixture
def stand_in(put, monkeypatch):
    """``stand_in(peak, replays)`` measures a and b on a "cuda" that is the CPU, with a terabyte of
    memory of which each takes ``peak`` bytes, and with these replays of a graph: the rows, and who
    were timed together, and replayed."""
    real_inputs, real_timing = peers.inputs, timing.time_many

    def measure(peak=1000, replays=None):
        timed, replayed = [], []

        def time_many(calls, *, device, **settings):
            assert device == "cuda"
            timed.append(list(calls))
            return real_timing(calls, device="cpu", **QUICK)

        def time_replays(makers, expected_ms):
            assert makers.keys() == expected_ms.keys()
            assert all(ms > 0 for ms in expected_ms.values())
            replayed.append(list(makers))
            for make in makers.values():
                make()()
            return replays or Replays(dict.fromkeys(makers, REPLAYED))

        monkeypatch.setattr(timing, "time_many", time_many)
        monkeypatch.setattr(graphs, "time_replays", time_replays)
        monkeypatch.setattr(comparison, "peak_bytes", lambda call: (call(), peak)[1])
        rows = put(comparison.measure, task("ab"), "cuda")
        return {(row["implementation"], row["pass"]): row for row in rows}, timed, replayed

    monkeypatch.setattr(memory, "total_bytes", lambda device: 10**12)
    monkeypatch.setattr(peers, "build", lambda name, shape, device: good)
    monkeypatch.setattr(peers, "inputs", lambda shape, _, seed: real_inputs(shape, "cpu", seed))
    return measure


def test_small_ones_take_turns_and_large_ones_are_alone(put, stand_in):
    _, timed, replayed = stand_in()
    assert timed == replayed == [["a", "b"]] * 3
    rows, timed, replayed = stand_in(peak=10**11)
    assert timed == replayed == [["a"], ["b"]] * 3 and not put.raised
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["peak_bytes"] for row in rows.values()} == {10**11}


def test_what_cannot_be_captured_keeps_its_time_and_says_why(put, stand_in):
    error, note = RuntimeError("x" * 1000), "no graph: RuntimeError: " + "x" * 173 + "..."
    rows, _, _ = stand_in(replays=Replays({"a": error, "b": REPLAYED}))
    assert not put.raised
    for pass_ in PASSES:
        row = rows["a", pass_]
        assert row["status"] == "ok" and row["ms"] > 0 and row["peak_bytes"] == 1000
        assert row["note"] == note and "ms_graph" not in row
        assert rows["b", pass_]["ms_graph"] == 0.25


def test_a_graph_that_spoils_the_device_is_noted_and_the_rest_measured_elsewhere(put, stand_in):
    error = RuntimeError("CUDA error: an illegal memory access")
    rows, _, _ = stand_in(replays=Replays({"b": error}, usable=False))
    assert isinstance(put.raised, failures.LostContext)
    # "a" was not come to: it is measured again, and on its own.
    assert list(rows) == [("b", "forward")]
    assert rows["b", "forward"]["status"] == "ok"
    assert rows["b", "forward"]["note"].startswith("no graph: ")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, refused", [("bf16", set()), ("fp32", {"sdpa_flash", "sdpa_cudnn"})]
)
def test_every_implementation_on_the_gpu(tmp_path, dtype, refused):
    """Through a real worker, as the notebook does: each is itself, right, and has a peak."""
    store = Store(FLASH, "gpu", data=tmp_path)
    run = start_run(command="test", parameters={}, device="gpu", data=tmp_path)
    shape, names = Shape(dtype, 1, 2, 512, 64, True), (*PUBLISHED, ASKED)
    assert not Sweep(store, run, "cuda").measure([task(names, shape=shape)])
    assert len(store.rows()) == len(names) * len(PASSES)
    for row in store.rows():
        name = row["implementation"]
        assert row["status"] == ("unsupported" if name in refused else "ok"), row
        if name in refused:
            assert row["note"], row
        else:
            assert float(row["ms"]) > 0 and int(row["peak_bytes"]) > 0, row
            assert not row["note"] and float(row["ms_graph"]) > 0 and float(row["ms_host"]) > 0, row
    both = {r["implementation"]: r for r in store.rows() if r["pass"] == "end_to_end"}
    eager, ours = (int(both[name]["peak_bytes"]) for name in ("eager", "a2lib"))
    assert eager > shape.matrix_bytes > 0 and ours < eager

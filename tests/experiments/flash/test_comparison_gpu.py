"""The branches of a comparison that a GPU takes: on a stand-in anywhere, and on the GPU itself."""

import dataclasses

import pytest
from experiments.flash.test_comparison import good, task

from a2lib.experiments.flash import comparison, peers
from a2lib.experiments.flash.shapes import ASKED, PUBLISHED, Shape
from a2lib.experiments.harness.sweep import Sweep, Task
from a2lib.measure import FLASH, Store, Timing, failures, graphs, memory, start_run, timing
from a2lib.measure.graphs import Replays
from a2lib.theory.attention import PASSES

BOTH = {"a": good, "b": good}


@pytest.fixture
def stand_in(put, monkeypatch):
    """A "cuda" that is the CPU, with ``total`` bytes of memory and a peak of ``peak`` bytes."""
    real_inputs, real_timing = peers.inputs, timing.time_many
    together = []

    def time_replays(makers, expected_ms):
        assert makers.keys() == expected_ms.keys() and all(ms > 0 for ms in expected_ms.values())
        together[-1] = together[-1], list(makers)
        for make in makers.values():
            make()()
        result = replayed(makers)
        return result if isinstance(result, Replays) else Replays(result)

    def replayed(makers):
        return dict.fromkeys(makers, Timing(0.25, 0.125, 0.5, 7))

    def time_many(calls, *, device, **settings):
        assert device == "cuda"
        together.append(list(calls))
        quick = {"warmup_ms": 0, "rep_ms": 1, "min_n": 1, "max_n": 2}
        return real_timing(calls, device="cpu", **quick)

    def measure(forwards, total, peak, replay=replayed, lost=False):
        nonlocal replayed
        replayed = replay
        together.clear()
        monkeypatch.setattr(memory, "total_bytes", lambda device: total)
        monkeypatch.setattr(comparison, "peak_bytes", lambda call: (call(), peak)[1])
        monkeypatch.setattr(peers, "build", lambda name, shape, device: forwards[name])
        rows = put(comparison.measure, task(forwards), "cuda")
        assert isinstance(put.raised, failures.LostContext if lost else type(None))
        return {(row["implementation"], row["pass"]): row for row in rows}, list(together)

    monkeypatch.setattr(peers, "inputs", lambda shape, _, seed: real_inputs(shape, "cpu", seed))
    monkeypatch.setattr(timing, "time_many", time_many)
    monkeypatch.setattr(graphs, "time_replays", time_replays)
    return measure


def test_small_ones_take_turns_and_large_ones_are_alone(stand_in):
    rows, together = stand_in(BOTH, total=10**12, peak=1000)
    assert together == [(["a", "b"], ["a", "b"])] * 3
    rows, together = stand_in(BOTH, total=10**12, peak=10**11)
    assert together == [(["a"], ["a"]), (["b"], ["b"])] * 3
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["peak_bytes"] for row in rows.values()} == {10**11}


def test_what_cannot_be_captured_keeps_its_time_and_says_why(stand_in):
    error, note = RuntimeError("x" * 1000), "no graph: RuntimeError: " + "x" * 173 + "..."
    done = {"a": error, "b": Timing(0.25, 0.125, 0.5, 7)}
    rows, _ = stand_in(BOTH, total=10**12, peak=1000, replay=lambda makers: done)
    for pass_ in PASSES:
        row = rows["a", pass_]
        assert row["status"] == "ok" and row["ms"] > 0 and row["peak_bytes"] == 1000
        assert row["note"] == note and "ms_graph" not in row
        assert rows["b", pass_]["ms_graph"] == 0.25


def test_a_graph_that_spoils_the_device_is_noted_and_the_rest_measured_elsewhere(stand_in):
    error = RuntimeError("CUDA error: an illegal memory access")
    done = Replays({"b": error}, usable=False)
    rows, _ = stand_in(BOTH, total=10**12, peak=1000, replay=lambda makers: done, lost=True)
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
    rows = {name: tuple(shape.key(name, p) for p in PASSES) for name in names}
    task = Task("", {"shape": dataclasses.asdict(shape)}, rows, in_turns=True)
    assert not Sweep(store, run, "cuda").measure([task])
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

"""The branches of a comparison that a GPU takes: on a stand-in anywhere, and on the GPU itself."""

import dataclasses

import pytest
import torch

from a2lib.attention import attention_reference
from a2lib.experiments import comparison, memory, peers
from a2lib.experiments.process import Worker
from a2lib.experiments.shapes import PUBLISHED, Shape
from a2lib.measure import timing
from a2lib.theory.attention import PASSES

SHAPE = Shape("fp32", 1, 2, 40, 16, True)


@pytest.fixture
def stand_in(monkeypatch):
    """A "cuda" that is the CPU, with ``total`` bytes of memory and a peak of ``peak`` bytes."""
    real_inputs, real_timing = peers.inputs, timing.time_many
    together = []

    def time_many(calls, *, device, **settings):
        assert device == "cuda"
        together.append(list(calls))
        quick = {"warmup_ms": 0, "rep_ms": 1, "min_n": 1, "max_n": 2}
        return real_timing(calls, device="cpu", **quick)

    def measure(forwards, total, peak):
        together.clear()
        monkeypatch.setattr(memory, "total_bytes", lambda device: total)
        monkeypatch.setattr("a2lib.measure.peak_bytes", lambda call: (call(), peak)[1])
        monkeypatch.setattr(peers, "build", lambda name, shape, device: forwards[name])
        rows = []
        wanted = dict.fromkeys(forwards, PASSES)
        comparison.Comparison(SHAPE, wanted, "cuda", rows.append).run()
        return {(row["implementation"], row["pass"]): row for row in rows}, list(together)

    monkeypatch.setattr(
        peers, "inputs", lambda shape, device, seed: real_inputs(shape, "cpu", seed)
    )
    monkeypatch.setattr(timing, "time_many", time_many)
    return measure


def good(q, k, v):
    return attention_reference(q, k, v, True)


def test_small_ones_take_turns_and_large_ones_are_alone(stand_in):
    rows, together = stand_in({"a": good, "b": good}, total=10**12, peak=1000)
    assert together == [["a", "b"]] * 3
    rows, together = stand_in({"a": good, "b": good}, total=10**12, peak=10**11)
    assert together == [["a"], ["b"]] * 3
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["peak_bytes"] for row in rows.values()} == {10**11}


def test_running_out_of_memory_in_one_pass_leaves_the_others(stand_in):
    calls = []

    def forward(q, k, v):
        calls.append(1)
        if len(calls) == 3:  # the first peak to be read, that of the forward
            raise torch.OutOfMemoryError("CUDA out of memory")
        return good(q, k, v)

    rows, _ = stand_in({"a": forward, "b": good}, total=10**12, peak=1000)
    assert {p: rows["a", p]["status"] for p in PASSES} == {
        "forward": "oom",
        "backward": "ok",
        "end_to_end": "ok",
    }
    assert all(rows["b", p]["status"] == "ok" for p in PASSES)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, refused", [("bf16", set()), ("fp32", {"sdpa_flash", "sdpa_cudnn"})]
)
def test_every_implementation_on_the_gpu(store, run, dtype, refused):
    """Through a real worker, as the notebook does: each is itself, right, and has a peak."""
    shape = Shape(dtype, 1, 2, 512, 64, True)
    task = {
        "do": "compare",
        "shape": dataclasses.asdict(shape),
        "wanted": dict.fromkeys(PUBLISHED, PASSES),
        "in_turns": True,
        "device": "cuda",
        "slug": store.device,
        "data": str(store.data),
        "run": run,
        "seed": 0,
        "until": None,
    }
    with Worker() as worker:
        events = list(worker.ask(task, 300))
    rows = [event["row"] for event in events if "row" in event]
    assert len(rows) == len(PUBLISHED) * len(PASSES) == len(store.rows())
    for row in rows:
        name = row["implementation"]
        assert row["status"] == ("unsupported" if name in refused else "ok"), row
        assert row["note"] if name in refused else row["ms"] > 0 and row["peak_bytes"] > 0
    stored = [store.get(shape.key(name, "end_to_end")) for name in ("eager", "a2lib")]
    eager, ours = (int(row["peak_bytes"]) for row in stored)
    assert eager > shape.matrix_bytes > 0 and ours < eager

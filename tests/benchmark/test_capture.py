"""Captured steps on a stand-in for CUDA graphs; on a GPU: tests/gpu/test_benchmark.py."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

from a2lib.benchmark import MODES, run
from a2lib.measure import graphs


class PlayedGraphs:
    """A capture runs nothing, a replay runs the call; the context of the stream is noted."""

    fails = broken = None
    log, alive, inside = [], [], 0

    def __init__(self, priority=0):
        self.log.append(f"priority {priority}") if priority else None

    @contextlib.contextmanager
    def on_stream(self):
        type(self).inside += 1
        try:
            yield
        finally:
            type(self).inside -= 1

    def capture(self, make, calls, first_replay):
        assert self.inside == 1 and calls == 0
        self.log.append("capture")
        if self.fails is not None:
            raise self.fails
        call = make()
        self.alive.append(call)

        def replay():
            assert self.inside == 1 and self.alive
            written = call()
            self.log.append(sorted(tuple(x.shape) for x in written))

        first_replay(replay)
        return SimpleNamespace(replay=replay, release=self.alive.clear)

    def mend(self):
        self.log.append("mend")
        if self.broken is not None:
            raise self.broken


@pytest.fixture
def played(calls, monkeypatch):
    """The stand-in's class, in the place of CudaGraphs; its log is that of the device's calls."""

    class Played(PlayedGraphs):
        log, alive = calls, []

    monkeypatch.setattr(graphs, "CudaGraphs", Played)
    return Played


@pytest.fixture
def captured(tiny):
    """A Config of the smallest model, captured."""
    options = {"device": "cuda", "capture": True, "warmup": 3, "steps": 3}
    return lambda **more: tiny(**{**options, **more})


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_is_the_step_that_would_have_come_next(captured, played, mode):
    plain = run(captured(mode=mode, capture=False))
    found = run(captured(mode=mode))
    assert (found.status, found.note) == ("ok", "")
    for part in ("warmup", "steps"):
        want = [step.loss for step in getattr(plain, part)]
        assert [step.loss for step in getattr(found, part)] == want
    replays = [*found.warmup[2:], *found.steps]
    assert all(tuple(step.ms) == found.config.phases for step in found.warmup[:2])
    for step in replays:
        assert (step.ms, list(step.host_ms)) == ({}, ["replay"])
        assert 0 < step.total_ms <= step.wall_ms
        assert (step.allocated_bytes, step.reserved_bytes) == (100, 200)
    assert list(found.summary()) == ["total", "wall"]
    assert "captured (one replay is one step)" in found.table()
    assert json.loads(json.dumps(found.as_dict()))["config"]["capture"] is True
    assert not played.alive and played.inside == 0


@pytest.mark.parametrize("mode", ["inference", "train-step"])
def test_a_replay_has_to_write_the_loss_and_every_gradient(captured, played, mode):
    result = run(captured(mode=mode, warmup=2, steps=1))
    shape = result.config.shape
    first, second = (entry for entry in played.log if isinstance(entry, list))
    assert first == second
    if "backward" not in result.config.phases:
        assert first == [(2, 6, shape.vocab_size)]
    else:
        # The loss; embedding and head, five norms and seven matrices in each of two blocks.
        assert first[0] == () and len(first) == 1 + 2 + 5 + 14


@pytest.mark.parametrize("error, status", [
    (RuntimeError("operation not permitted when stream is capturing"), "unsupported"),
    (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
])  # fmt: skip
def test_what_cannot_be_captured_is_a_result(captured, played, monkeypatch, error, status):
    monkeypatch.setattr(played, "fails", error)
    result = run(captured())
    assert (result.status, len(result.warmup), result.steps) == (status, 2, [])
    assert result.note.startswith("in capture: ") and str(error) in result.note
    assert played.log.count("mend") == 1 and played.inside == 0


@pytest.mark.parametrize("error, broken", [
    (TypeError("a fault of ours"), None), (KeyboardInterrupt(), None),
    # A device that the failed capture broke.
    (RuntimeError("illegal memory access"), graphs.Unusable("no capture")),
])  # fmt: skip
def test_other_errors_pass(captured, played, monkeypatch, error, broken):
    monkeypatch.setattr(played, "fails", error)
    monkeypatch.setattr(played, "broken", broken)
    with pytest.raises(type(broken or error)):
        run(captured())


def test_the_optimizer_is_one_that_can_be_captured(captured, played, monkeypatch):
    asked = []
    plain = torch.optim.AdamW.__init__

    def watch(self, *args, **options):
        asked.append((options["fused"], options["capturable"]))
        plain(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", watch)
    run(captured())
    run(captured(capture=False))
    assert asked == [(True, True), (True, False)]

"""Captured steps on a stand-in for CUDA graphs; on a GPU: tests/gpu/test_benchmark.py."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

from a2lib.benchmark import MODES, run
from a2lib.lab import graphs


class PlayedGraphs:
    """A capture runs nothing, a replay runs the call; the context of the stream is noted."""

    def __init__(self):
        self.fails = self.broken = None  # what a capture raises, and then mending
        self.alive, self.written = [], []  # calls of live captures; shapes, a list for each replay
        self.inside = self.mended = 0

    @contextlib.contextmanager
    def on_stream(self):
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def capture(self, make, calls, first_replay):
        assert self.inside == 1 and calls == 0
        if self.fails is not None:
            raise self.fails
        call = make()
        self.alive.append(call)

        def replay():
            assert self.inside == 1 and self.alive
            self.written.append(sorted(tuple(x.shape) for x in call()))

        first_replay(replay)
        return SimpleNamespace(replay=replay, release=self.alive.clear)

    def mend(self):
        self.mended += 1
        if self.broken is not None:
            raise self.broken


@pytest.fixture
def played(calls, monkeypatch):
    """The stand-in, in the place of any CudaGraphs of the played device."""
    played = PlayedGraphs()
    monkeypatch.setattr(graphs, "CudaGraphs", lambda priority: played)
    return played


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
    first, second = played.written
    assert first == second
    if "backward" not in result.config.phases:
        assert first == [(2, 6, shape.vocab_size)]
    else:
        # The loss; embedding and head, five norms and seven matrices in each of two blocks.
        assert first[0] == () and len(first) == 1 + 2 + 5 + 14


REFUSED = RuntimeError("operation not permitted when stream is capturing")
FULL = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("error, status", [(REFUSED, "unsupported"), (FULL, "oom")])
def test_what_cannot_be_captured_is_a_result(captured, played, error, status):
    played.fails = error
    result = run(captured())
    assert (result.status, len(result.warmup), result.steps) == (status, 2, [])
    assert result.note.startswith("in capture: ") and str(error) in result.note
    assert played.mended == 1 and played.inside == 0


@pytest.mark.parametrize("error", [TypeError("a fault of ours"), KeyboardInterrupt()])
def test_other_errors_pass(captured, played, error):
    played.fails = error
    with pytest.raises(type(error)):
        run(captured())


def test_a_device_that_a_capture_broke_is_an_error(captured, played):
    played.fails, played.broken = RuntimeError("illegal memory access"), graphs.Unusable("broken")
    with pytest.raises(graphs.Unusable):
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

"""Training steps on the CPU: phases, losses, gradients; on a GPU: tests/gpu/test_steps.py."""

import contextlib
import itertools
import math

import pytest
import torch
from refusals import refused

from a2lib.lab.steps import PHASES, StepConfig, TrainingStep, timed
from a2lib.shapes import Shape

SHAPE = Shape(d_model=8, d_ff=12, num_layers=2, num_heads=2, vocab_size=11)


def make(seed=0, **options):
    return TrainingStep(StepConfig(model=SHAPE, context=6, batch=2, **options), "cpu", seed)


def losses(step, n=3):
    return [timed(step).loss for _ in range(n)]


OF_EACH_MODE = [("train-step", "bf16_weights"), *itertools.product(PHASES, ["fp32"])]


@pytest.mark.parametrize(("mode", "precision"), OF_EACH_MODE)
def test_every_phase_of_a_mode_has_its_time(mode, precision):
    step = make(mode=mode, precision=precision)
    values = []
    for _ in range(3):
        times = timed(step)
        assert tuple(times.ms) == (*PHASES[mode], "step", "wall")
        assert tuple(times.host_ms) == (*PHASES[mode], "step")
        whole, wall = times.ms.pop("step"), times.ms.pop("wall")
        assert 0 < sum(times.ms.values()) <= whole <= wall
        assert (times.loss is not None) == ("loss" in PHASES[mode])
        values.append(times.loss)
    if "optimizer" in PHASES[mode]:
        assert values[0] > values[1] > values[2]
    else:
        assert len(set(values)) == 1


def test_one_seed_is_one_training():
    first, again, other = losses(make()), losses(make()), losses(make(seed=1))
    assert first == again != other
    assert first == pytest.approx([math.log(SHAPE.vocab_size)] * 3, abs=3)


def test_weights_of_zero_stay_zero():
    step = make(weights="zero")
    assert losses(step) == pytest.approx([math.log(SHAPE.vocab_size)] * 3)
    for weights in step.model.parameters():
        assert not weights.any()


def test_what_changes_nothing_of_the_result():
    plain = losses(make())
    assert losses(make(checkpointing="block")) == plain
    assert losses(make(attention="sdpa_math")) == pytest.approx(plain, rel=1e-4)
    uncached = make(precision="bf16")
    uncached.autocast_cache = False
    assert losses(uncached) == losses(make(precision="bf16")) != plain


def test_blocks_are_compiled_as_one_graph_for_all_and_the_loss(monkeypatch):
    plain, graphs = torch.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda m, **options: plain(m, backend=backend, **options))
    torch._dynamo.reset()
    mode = "forward-backward"
    compiled = losses(make(compile="blocks", mode=mode), 1)
    assert compiled == pytest.approx(losses(make(mode=mode), 1), rel=1e-4)
    assert len(graphs) == 2


@pytest.mark.parametrize("mode", ["forward-backward", "train-step"])
def test_gradients_between_steps_are_dropped_or_zero(mode):
    step = make(mode=mode)
    dropped = losses(step)
    assert step.gradients() == []
    step = make(mode=mode)
    step.keep_gradients = True
    assert losses(step) == dropped
    before = step.gradients()
    assert before
    for gradient in before:
        assert not gradient.any()
    timed(step)
    for gradient, old in zip(step.gradients(), before, strict=True):
        assert gradient.data_ptr() == old.data_ptr()


def test_autocast_is_on_where_asked_and_off_in_backward():
    seen = []

    @contextlib.contextmanager
    def phase(name):
        seen.append((name, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        yield

    make(precision="bf16")(phase)
    on = [("forward", True, True), ("loss", True, True)]
    assert seen == [*on, ("backward", False, True), ("optimizer", False, True)]
    seen.clear()
    make(mode="inference")(phase)
    assert seen == [("forward", False, False)]


def test_a_row_names_its_step():
    key = {"model": "tiny", "context": 16, "mode": "forward", "capture": False, "warmup": 5}
    assert StepConfig.of(key) == StepConfig(model="tiny", context=16, mode="forward")


def test_what_is_no_step_is_refused():
    refused("mode 'other': allowed are", StepConfig, mode="other")

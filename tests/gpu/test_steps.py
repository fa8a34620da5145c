"""Training steps on a GPU: events, every option, and the step as a CUDA graph."""

import itertools

import pytest
import torch

from a2lib.lab import memory
from a2lib.lab.steps import PHASES, StepConfig, TrainingStep, captured, graph_stream, timed
from a2lib.shapes import Shape

pytestmark = pytest.mark.gpu
SHAPE = Shape(d_model=768, d_ff=3072, num_layers=2, num_heads=12)
BF16, FLASH = {"precision": "bf16"}, {"precision": "bf16", "attention": "flash"}
PEERS = [
    BF16 | {"attention": "sdpa_flash"},
    BF16 | {"attention": "sdpa_cudnn"},
    BF16 | {"attention": "sdpa_efficient"},
    BF16 | {"attention": "flex"},
]
# Where a sum may be taken in another order: atomics of a peer's backward, Inductor's scatter into
# the gradient of the embedding. After five steps of AdamW.
REORDERED = 2e-3


def run(n=5, **options):
    """Return the times of n steps; of a captured one the replays from the third on."""
    torch._dynamo.reset()
    memory.clear("cuda")
    config = StepConfig(model=SHAPE, context=128, batch=2, **options)
    with graph_stream(config):
        step = TrainingStep(config, "cuda")
        times = [timed(step), timed(step)]
        if config.capture:
            step = captured(step)  # the third
            times.append(None)
        while len(times) < n:
            times.append(timed(step))
        return times


@pytest.mark.parametrize("mode", PHASES)
def test_two_clocks(mode):
    for times in run(mode=mode)[2:]:
        phases = sum(map(times.ms.get, PHASES[mode]))
        assert 0 < phases <= times.ms["step"] * 1.01 <= times.ms["wall"] * 1.02


@pytest.mark.parametrize("options", [
    {"precision": "tf32"}, BF16, FLASH, *PEERS,
    {**BF16, "compile": "model"},
    {**FLASH, "compile": "blocks"},
    {**BF16, "checkpointing": "block"},
    {"precision": "bf16_weights"},
    {"mode": "overlapped-step"},
    {"precision": "bf16_weights", "mode": "overlapped-step", "compile": "blocks"},
], ids=str)  # fmt: skip
def test_every_option_trains_alike(options):
    plain, other = run(), run(**options)
    for want, times in zip(plain, other, strict=True):
        assert times.loss == pytest.approx(want.loss, rel=0.02)


@pytest.mark.parametrize("options, tolerance", [
    *itertools.product([{"mode": mode} for mode in PHASES], [0]),
    ({"precision": "tf32"}, 0),
    ({**BF16, "mode": "train-step"}, 0),
    ({**BF16, "mode": "forward"}, 0),
    ({**BF16, "mode": "forward-backward"}, 0),
    (FLASH, 0),
    ({**FLASH, "checkpointing": "block"}, 0),
    *itertools.product(PEERS, [REORDERED]),
    ({**FLASH, "compile": "model"}, REORDERED),
    ({**FLASH, "compile": "blocks"}, REORDERED),
    ({"precision": "bf16_weights", "mode": "overlapped-step", "compile": "blocks"}, REORDERED),
], ids=str)  # fmt: skip
def test_captured_steps_have_the_losses_of_plain_ones(options, tolerance):
    plain, captured = run(**options), run(capture=True, **options)
    for want, times in zip(plain[3:], captured[3:], strict=True):
        assert times.loss == pytest.approx(want.loss, rel=tolerance, abs=0)
        assert tuple(times.ms) == ("step", "wall") and 0 < times.ms["step"]


def test_a_step_that_cannot_be_captured_is_unsupported_and_ends_its_process(python):
    """It reads a value, for which a capture cannot wait."""
    code = """
from a2lib.lab.failures import classify, is_lost
from a2lib.lab.steps import StepConfig, TrainingStep, captured, graph_stream

config = StepConfig(context=128, batch=2, capture=True)
with graph_stream(config):
    step = TrainingStep(config, "cuda")
    plain = step.loss
    step.loss = lambda *x: plain(*x) * (1 if x[0].sum().item() else 1)
    step()
    try:
        captured(step)
    except Exception as error:
        print(classify(error)[0], is_lost(error), flush=True)
"""
    out, _ = python(code).communicate()
    assert "unsupported True" in out

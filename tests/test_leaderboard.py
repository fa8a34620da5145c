"""The leaderboard's step: how it is planned.

The steps themselves are checked in ranks, tests/parallel/checks_leaderboard.py, and measured in
tests/notebooks/test_leaderboard_cells.py.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from refusals import refused

from a2lib import leaderboard
from a2lib.activations import PRODUCTS, BlockPlan
from a2lib.leaderboard import LADDER, ChunkedHead, Step
from a2lib.shapes import MODELS, SIZES


def step_on_gpus(way):
    return Step(LADDER[way], SIZES["8B"], 1, 32_768, "sdpa_cudnn", "bf16")


def test_operands_in_fp8_have_room_in_the_plan():
    plain, step = step_on_gpus("own_copies"), step_on_gpus("fp8_ffn")
    assert step.way == dataclasses.replace(plain.way, ffn="fp8")
    d, f, tokens = 4096, 11_008, 32_768
    operands = 5 * tokens * f + 3 * tokens * d + 3 * d * f
    assert step.working_bytes() - plain.working_bytes() == operands


def step_that(keeps, room_percent=75):
    way = next(filter(lambda way: way.keeps == keeps, LADDER.values()))
    shape = dataclasses.replace(MODELS["tiny"], num_layers=4)
    return Step(way, shape, 1, 32, "sdpa_flash", "fp32", room_percent)


def test_the_plan_is_what_fits_every_rank(monkeypatch):
    monkeypatch.setattr(leaderboard, "everyone", lambda value: [value])
    plan = leaderboard.plan
    assert plan(step_that("fitting", 100), 0, "cpu") == [BlockPlan(PRODUCTS)] * 4
    less = plan(step_that("fitting"), 0, "cpu")
    assert less != [BlockPlan(PRODUCTS)] * 4
    assert all(block.moved == 0 for block in less)
    sent = plan(step_that("moved"), 0, "cpu")
    assert {block.kept for block in sent} == {PRODUCTS} and sent[0].moved and not sent[-1].moved
    # Beside what this rank has no room is left.
    refused("allowed|room|fits", plan, step_that("moved", None), 10**15, "cpu")
    assert leaderboard.plans_of(step_that("input"), "cpu") is None
    assert leaderboard.plans_of(step_that("attention"), "cpu")(None) == [BlockPlan(())] * 4
    # Another rank's link carries nothing.
    slow_link = leaderboard.CPU_LINK
    monkeypatch.setattr(leaderboard, "everyone", lambda v: [v, 0.0] if v == slow_link else [v])
    assert plan(step_that("moved"), 0, "cpu") == less


@pytest.mark.parametrize("left_out", [slice(0), slice(0, None, 3), slice(6, 12), slice(None)])
def test_chunks_have_pytorch_s_loss_and_gradients_with_tokens_left_out(left_out):
    """None of them, some in every chunk, a chunk, all."""
    model = ChunkedHead(19, 12, 24, 1, 2, 40, seed=0, dtype=torch.float64)
    model.chunk = 6
    tokens, targets = torch.randint(19, (2, 2, 10))
    targets.view(-1)[left_out] = -100
    parameters = dict(model.named_parameters())
    wanted = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    gradients = torch.autograd.grad(wanted, parameters.values())
    loss = model(tokens, targets)
    torch.testing.assert_close(loss, wanted, equal_nan=True)
    loss.backward()
    for (name, p), right in zip(parameters.items(), gradients, strict=True):
        torch.testing.assert_close(p.grad, right, msg=name, equal_nan=True)

"""The leaderboard's step: what the command takes and prints, how steps are counted and planned.

The steps themselves are checked in ranks, tests/parallel/checks_leaderboard.py.
"""

import dataclasses
import functools
import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from refusals import refused, refused_command

from a2lib import leaderboard
from a2lib.activations import PRODUCTS, BlockPlan
from a2lib.lab import Timing
from a2lib.leaderboard import LADDER, ChunkedHead, Step
from a2lib.shapes import MODELS, SIZES
from a2lib.theory.transformer import forward_flops

SMALL = ["--size=tiny", "--num-layers=3", "--context=16"]


def test_what_it_refuses_is_one_line(capsys):
    for options, complaint in {
        "--way=fast": "way 'fast': allowed are recomputed, attention_kept, fused_head",
        "--way=own_attention": "way 'own_attention': allowed without a GPU are recomputed, ",
        "--size=7B": "size '7B': allowed are tiny, small, medium",
        "--layers=4": "unknown --layers=4 (did you mean --num-layers?); allowed are --help, --way",
        "--num-layers=100 --size=10B": "GB at least; allowed is what fits",
    }.items():
        line = refused_command(lambda a: leaderboard.parse(a, "cpu"), options.split(), capsys)
        assert complaint in line


def test_without_torchrun_it_says_how_to_start_it(capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert "start it by torchrun" in refused_command(leaderboard.main, SMALL, capsys)


def test_the_board_s_step_is_the_default_on_gpus():
    name, step, _ = leaderboard.parse([], "cuda")
    assert name == "own_copies" and step.shape == SIZES["8B"]
    assert (step.batch, step.context, step.dtype) == (1, 32_768, "bf16")
    assert (leaderboard.WARMUP_MS, leaderboard.REP_MS) == (10_000, 30_000)


def test_fp8_products_are_asked_for_by_name():
    """And their operands have room in the plan."""
    _, plain, _ = leaderboard.parse([], "cuda")
    name, step, _ = leaderboard.parse(["--way=fp8_ffn"], "cuda")
    assert name == "fp8_ffn" and step.way == dataclasses.replace(plain.way, ffn="fp8")
    d, f, tokens = 4096, 11_008, 32_768
    operands = 5 * tokens * f + 3 * tokens * d + 3 * d * f
    assert step.working_bytes() - plain.working_bytes() == operands


def step_that(keeps, room_percent=75):
    way = next(filter(lambda way: way.keeps == keeps, LADDER.values()))
    shape = dataclasses.replace(MODELS["tiny"], num_layers=4)
    return Step(way, shape, 1, 32, "sdpa_flash", "fp32", room_percent)


@pytest.mark.parametrize("slowest", [1.0, 3.0])
def test_all_ranks_take_the_same_number_of_steps(monkeypatch, slowest):
    """That of the slowest rank's estimate."""
    calls = []
    monkeypatch.setattr(leaderboard.Mark, "ms_until", lambda *_: 1.0)
    monkeypatch.setattr(leaderboard, "everyone", lambda estimate: [estimate, slowest])
    times = leaderboard.board(lambda: calls.append(0), "cpu", 1000, 3000)
    assert times == [1.0] * (30 if slowest == 1.0 else 10)
    assert len(calls) == 1 + 5 + len(times) + (10 if slowest == 1.0 else 3)


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


def test_the_command_prints_what_was_measured(capsys, monkeypatch):
    """tests/notebooks/test_leaderboard_cells.py measures, in two ranks."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    store = dist.HashStore()
    meet = functools.partial(dist.init_process_group, "gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(leaderboard, "join_group", lambda device: meet())

    def measure(step, device, seed, say):
        say("warm-up and timed steps")
        return Timing(2.0, 1.0, 3.0, 7), {"loss": 4.5}, None

    monkeypatch.setattr(leaderboard, "measure", measure)
    leaderboard.main(SMALL)
    printed = capsys.readouterr()
    row = json.loads(printed.out)
    expected = {"way": "offloaded", "ranks": 1, "ms": 2, "n": 7, "loss": 4.5}
    assert expected.items() <= row.items()
    assert row["parameters"] > 0 and row["tflops"] > 0
    assert "s: warm-up and timed steps" in printed.err


def test_a_rate_counts_what_a_step_needs():
    _, step, _ = leaderboard.parse(SMALL, "cpu")
    # Forward, and a backward of twice that; causal attention is half of what that counts.
    assert step.flops == 3 * (forward_flops(step.shape, 1, 16) - 2 * 16**2 * 3 * step.shape.d_model)


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

"""The experiment on the leaderboard's step: what is asked for, how it is timed and planned.

The steps themselves are checked in ranks: tests/parallel/checks_leaderboard.py.
"""

import dataclasses

import pytest
import torch
from refusals import refused

from a2lib.experiments import leaderboard
from a2lib.experiments.leaderboard import WAYS, Parameters
from a2lib.experiments.steps import MODELS
from a2lib.lab import LEADERBOARD
from a2lib.leaderboard import LADDER, Step, run
from a2lib.theory.memory.keeping import PRODUCTS, BlockPlan
from a2lib.theory.transformer import SIZES, parameter_count


def test_a_rank_s_work_on_one_gpu_and_a_trial_on_none(gpus):
    gpus(1)
    given = Parameters(world_size=1, layers=8, room_percent=75, ways="offloaded,fused_head")
    fused, offloaded = given.asked()
    assert fused.step.way.name == "fused_head" and offloaded.step.shape.num_layers == 8
    assert offloaded.step.room_percent == 75
    gpus(0)
    asked = Parameters().asked()
    assert [one.step.way.name for one in asked] == list(WAYS[:-1])
    assert {(one.ranks.backend, one.model, one.step.dtype) for one in asked} == {
        ("gloo", "tiny", "fp32")
    }
    assert {one.key()["layers"] for one in asked} == {4}


def step(keeps="moved", **given):
    way = next(way for way in LADDER if way.keeps == keeps)
    shape = dataclasses.replace(MODELS["tiny"], num_layers=4)
    return Step(way, shape, 1, 32, "sdpa_flash", "fp32", **{"room_percent": 75, **given})


@pytest.mark.parametrize("slowest", [1.0, 3.0])
def test_all_ranks_take_the_same_number_of_steps(monkeypatch, slowest):
    """That of the slowest rank's estimate."""
    calls = []
    monkeypatch.setattr(run.Mark, "ms_until", lambda *_: 1.0)
    monkeypatch.setattr(run, "everyone", lambda estimate: [estimate, slowest])
    times = run.board(lambda: calls.append(0), "cpu", 1000, 3000)
    assert times == [1.0] * (30 if slowest == 1.0 else 10)
    assert len(calls) == 1 + 5 + len(times) + (10 if slowest == 1.0 else 3)


def test_the_plan_is_what_fits_every_rank(monkeypatch):
    monkeypatch.setattr(run, "everyone", lambda value: [value])
    whole = run.plan(step("fitting", room_percent=100), 0, "cpu")
    assert whole == [BlockPlan(PRODUCTS)] * 4
    less = run.plan(step("fitting"), 0, "cpu")
    assert sum(len(p.kept) for p in less) < 20 and not any(p.moved for p in less)
    sent = run.plan(step(), 0, "cpu")
    assert {p.kept for p in sent} == {PRODUCTS} and sent[0].moved and not sent[-1].moved
    # Beside what this rank has no room is left.
    refused("allowed|room|fits", run.plan, step(room_percent=None), 10**15, "cpu")
    assert run.plans_of(step("input"), "cpu") is None
    assert run.plans_of(step("attention"), "cpu")(None) == [BlockPlan(())] * 4
    # Another rank's link carries nothing.
    monkeypatch.setattr(run, "everyone", lambda v: [v, 0.0] if v == run.CPU_LINK else [v])
    assert run.plan(step(), 0, "cpu") == less


def test_a_rate_counts_what_a_step_needs(gpus):
    gpus(2)
    first = Parameters().asked()[0]
    # 6 operations a parameter and token but for the embedding, and 12 for each score and d_model,
    # half of them causal.
    tokens, table = 32_768, 151_936 * 4096
    products = 6 * tokens * (parameter_count(SIZES["8B"]) - table - 69 * 4096)
    attention = 34 * 6 * tokens**2 * 4096
    row = {name: str(value) for name, value in first.key().items()}
    assert leaderboard.tflops({**row, "ms": "1000"}) == pytest.approx((products + attention) / 1e12)


@pytest.mark.gpu
def test_rows_of_a_gpu(measured):
    """Every way in the processes that there are GPUs for, and the losses of all."""
    n = min(2, torch.cuda.device_count())
    size = {"model": "2.7B", "layers": 4, "context": 2048, "room_percent": 75}
    given = Parameters(world_size=n, **size, warmup_ms=1, rep_ms=1, cold=False)
    rows = {row["way"]: row for row in measured(LEADERBOARD, leaderboard.tasks(given))}
    assert set(rows) == set(WAYS)
    first = rows["recomputed"]
    for row in rows.values():
        for name in ("loss", "gradient_norm"):
            assert float(row[name]) == pytest.approx(float(first[name]), rel=0.02), row["way"]
    assert int(rows["offloaded"]["host_bytes"]) > 0 == int(rows["products_kept"]["host_bytes"])
    kept = {way: int(row["kept_bytes"]) for way, row in rows.items()}
    assert kept["offloaded"] <= kept["products_kept"] * 1.05
    assert kept["own_fsdp"] < kept["products_kept"]

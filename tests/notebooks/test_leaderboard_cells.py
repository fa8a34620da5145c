"""notebooks/leaderboard.ipynb: what it asks for, and what two ranks measure of it on the CPU.

The losses of all ways are compared in tests/parallel/checks_leaderboard.py.
"""

import dataclasses

import committed
import pytest
from notebook_cells import flat, identities, load_cells, published, rows_of_two_ranks
from tables import by, values, where

from a2lib.lab import bulk, sweep
from a2lib.lab.notebook import Run
from a2lib.lab.ranks import SWITCHES
from a2lib.lab.timing import Mark

TRIAL = {"rep_ms": 300, "warmup_ms": 100}
# Compiled graphs are checked in tests/parallel; to load and run what makes them takes seconds.
UNCOMPILED = """
measure_compiled = measure

def measure(keys):
    leaderboard.COMPILER["cpu"] = "eager"
    yield from measure_compiled(keys)
"""

pytestmark = pytest.mark.usefixtures("forked_workers")


def test_every_published_way_is_asked_for(gpus):
    gpus(2)
    cells = load_cells("leaderboard")
    assert published(cells.table) == identities(cells.table, cells.tasks)
    for row in committed.measured("leaderboard"):
        switch, _, _ = row["conditions"].partition("=")
        assert switch in SWITCHES


def test_a_rank_s_work_on_one_gpu_and_a_trial_on_none(gpus):
    gpus(1)
    cells = load_cells("leaderboard", world_size=1, layers=8, room_percent=75, ways="offloaded")
    [[key]] = cells.tasks
    assert (key["way"], key["layers"], key["backend"]) == ("offloaded", 8, "nccl")
    assert cells.room == 75
    gpus(0)
    cells = load_cells("leaderboard")
    asked = flat(cells.tasks)
    on_gpus = {"own_attention", "own_copies", "fp8_ffn", "bf16_states"}
    assert values(asked, "way") == [name for name in cells.MAKE if name not in on_gpus]
    setting = ("gloo", "tiny", "fp32", 4)
    assert set(values(asked, "backend", "model", "dtype", "layers")) == {setting}


@pytest.mark.parametrize("slowest", [1.0, 3.0])
def test_all_ranks_take_the_same_number_of_steps(gpus, monkeypatch, slowest):
    """That of the slowest rank's estimate."""
    gpus(0)
    cells = load_cells("leaderboard", warmup_ms=1000, rep_ms=3000)
    calls = []
    monkeypatch.setattr(Mark, "ms_until", lambda *_: 1.0)
    cells.namespace["everyone"] = lambda estimate: [estimate, slowest]
    times = cells.board(lambda: calls.append(0))
    assert times == [1.0] * (30 if slowest == 1.0 else 10)
    assert len(calls) == 1 + 5 + len(times) + (10 if slowest == 1.0 else 3)


@pytest.mark.slow
def test_rows_of_two_ranks_and_of_the_readers_own_way(gpus):
    gpus(0)
    cells = load_cells("leaderboard", ways="own_attention", **TRIAL)
    cells.MAKE["mine"] = dataclasses.replace(cells.MAKE["offloaded"], attention="eager")
    cells.tasks.append([cells.key_of("mine")])
    exec(UNCOMPILED, cells.namespace)
    rows = by(rows_of_two_ranks(cells.table, cells.tasks, cells.namespace["measure"]), "way")
    assert rows["own_attention"]["status"] == "unsupported" and rows["own_attention"]["note"]
    row = rows["mine"]
    assert (row["status"], row["products_again"], row["attention"]) == ("ok", "0", "eager"), row
    assert float(row["loss"]) > 0 and float(row["gradient_norm"]) > 0
    assert float(row["ms_ready"]) > float(row["ms"]) > 0 and int(row["host_bytes"]) > 0
    drawn = bulk.read("kernels", "cpu", "leaderboard-tiny-mine-4-layers-2-ranks")
    assert drawn.about["section"] == "leaderboard" and drawn.run == row["run"]
    for phase in ("forward", "backward", "optimizer"):
        assert float(row[f"ms_{phase}"]) > 0
        assert where(drawn.rows, phase=phase)


def test_losses_are_of_three_trainings_from_each_seed(gpus):
    gpus(1)
    cells = load_cells("leaderboard", part="loss")
    assert (cells.device, cells.loss_device) == ("cpu", "cuda")  # the ladder asks for two
    keys = flat(cells.loss_tasks)
    assert len(keys) == 9 and set(values(keys, "seed")) == {0, 1, 2}
    trained = set(values(keys, "ffn", "compile"))
    assert trained == {("bf16", "blocks"), ("fp8", "blocks"), ("bf16", "none")}
    assert set(values(keys, "model", "steps", "batch", "context")) == {("small", 200, 8, 512)}
    gpus(0)
    cells = load_cells("leaderboard", part="loss")
    assert cells.loss_device == "cpu"
    assert set(values(flat(cells.loss_tasks), "model")) == {"tiny"}


@pytest.mark.slow
def test_a_model_learns_text_with_and_without_fp8(gpus):
    gpus(0)
    cells = load_cells("leaderboard", part="loss")
    keys = where(flat(cells.loss_tasks), seed=0)
    names = cells.namespace
    exec('leaderboard.COMPILER["cpu"] = "eager"', names)
    names["LEARNING_RATE"] = 0.01
    run = Run("leaderboard", {}, {}, "cpu", "cpu")
    assert sweep(cells.losses, [keys], names["measure_loss"], run, device="cpu") == 0
    rows = by(cells.losses.rows(), "ffn", "compile")
    assert set(values(rows.values(), "status", "n")) == {("ok", "19")}, rows
    bf16, fp8 = rows["bf16", "none"], rows["fp8", "blocks"]
    # A byte by chance: ln 256 = 5.5. Other roundings are another loss.
    assert float(bf16["loss_held_out"]) < 5 and float(fp8["loss_held_out"]) < 5
    assert fp8["loss_held_out"] != bf16["loss_held_out"] and fp8["loss_last"] != bf16["loss_last"]

"""notebooks/checkpointing.ipynb: what it asks for, what a strategy must be, and what is stored."""

import pytest
from notebook_cells import committed_keys, load_cells, run_cells, stored_keys

from a2lib.lab import start, sweep

SMALL = {"context": 8, "precision": "fp32"}


pytestmark = pytest.mark.usefixtures("forked_workers")


def test_the_sweeps_ask_for_every_committed_row(monkeypatch):
    monkeypatch.setattr("a2lib.lab.device_kind", lambda: "cuda")
    keys = [key for task in load_cells("checkpointing", sweep="all").tasks for key in task]
    assert stored_keys("checkpointing", keys) == committed_keys("checkpointing")
    assert len(stored_keys("checkpointing", keys)) == len(keys)


@pytest.mark.parametrize("gradients", ["fresh", "kept"])
def test_every_strategy_of_the_frontier_is_measured(gradients):
    cells = load_cells("checkpointing", **SMALL, steps=2, gradients=gradients)
    (keys,) = [cells.task(cells.frontier, cells.WIDE, gradients)]
    rows = list(cells.measure(keys))
    assert [row["strategy"] for row in rows] == cells.frontier
    values = {"ms", "ms_p20", "ms_p80", "n", "ms_forward", "ms_backward"}
    for row in rows:
        assert set(row) == {*cells.table.key, *values}, row
        assert (row["layers"], row["n"]) == (4, 2)
        assert row["ms_forward"] + row["ms_backward"] <= row["ms"]


def test_a_strategy_that_fails_is_a_row_and_the_next_goes_on():
    def no_room(blocks, x):
        raise MemoryError

    def leaves_a_block_out(blocks, x):
        for block in list(blocks)[1:]:
            x = block(x)
        return x

    def mine(blocks, x):
        from torch.utils.checkpoint import checkpoint

        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    cells = load_cells("checkpointing", **SMALL, steps=1)
    cells.STRATEGY.update(no_room=no_room, wrong=leaves_a_block_out, mine=mine)
    names = ["none", "no_room", "wrong", "mine", "every_other", "segments:2"]
    tasks = [[{**cells.tasks[0][0], "strategy": name} for name in names]]
    run = start("checkpointing", vars(cells))
    assert sweep(cells.table, tasks, cells.measure, run) == 0
    rows = {row["strategy"]: (row["status"], row["note"]) for row in cells.table.rows()}
    wrong = "ArithmeticError: its gradients are not those of a step that keeps everything"
    expected = dict.fromkeys(names, ("ok", ""))
    assert rows == expected | {"no_room": ("oom", "out of memory"), "wrong": ("error", wrong)}


@pytest.mark.slow
def test_all_cells_store_and_draw_a_row_for_each_strategy():
    cells = run_cells("checkpointing", **SMALL, strategies="none,block,every_other", steps=1)
    rows = cells.table.rows()
    assert {row["strategy"] for row in rows} == {"none", "block", "every_other"}
    assert {(row["status"], row["n"], row["layers"]) for row in rows} == {("ok", "1", "4")}
    assert len(cells.figure.axes) == 1
    assert list(cells.shown["counted_GB"].notna()) == [True, True, False]

"""notebooks/checkpointing.ipynb: what it asks for, what a strategy must be, and what is stored."""

import pytest
from notebook_cells import identities, load_cells, published, run_cells
from tables import values

from a2lib.lab import start, sweep

SMALL = {"context": 8, "precision": "fp32"}

pytestmark = pytest.mark.usefixtures("forked_workers")


def test_the_sweeps_ask_for_every_committed_row(monkeypatch):
    monkeypatch.setattr("a2lib.lab.device_kind", lambda: "cuda")
    cells = load_cells("checkpointing", sweep="all")
    assert identities(cells.table, cells.tasks) == published(cells.table)


@pytest.mark.parametrize("gradients", ["fresh", "kept"])
def test_every_strategy_of_the_frontier_is_measured(gradients):
    cells = load_cells("checkpointing", **SMALL, steps=2, gradients=gradients)
    rows = list(cells.measure(cells.task(cells.frontier, cells.WIDE, gradients)))
    assert values(rows, "strategy") == cells.frontier
    results = {"ms", "ms_p20", "ms_p80", "n", "ms_forward", "ms_backward"}
    for row in rows:
        assert set(row) == {*cells.table.key, *results}, row
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
    task = [{**cells.tasks[0][0], "strategy": name} for name in names]
    run = start("checkpointing", vars(cells))
    assert sweep(cells.table, [task], cells.measure, run) == 0
    wrong = "ArithmeticError: its gradients are not those of a step that keeps everything"
    assert values(cells.table.rows(), "strategy", "status", "note") == [
        ("none", "ok", ""),
        ("no_room", "oom", "out of memory"),
        ("wrong", "error", wrong),
        ("mine", "ok", ""),
        ("every_other", "ok", ""),
        ("segments:2", "ok", ""),
    ]


@pytest.mark.slow
def test_all_cells_store_and_draw_a_row_for_each_strategy():
    cells = run_cells("checkpointing", **SMALL, strategies="none,block,every_other", steps=1)
    rows = cells.table.rows()
    assert set(values(rows, "strategy")) == {"none", "block", "every_other"}
    assert set(values(rows, "status", "n", "layers")) == {("ok", "1", "4")}
    assert len(cells.figure.axes) == 1
    assert list(cells.shown["counted_GB"].notna()) == [True, True, False]

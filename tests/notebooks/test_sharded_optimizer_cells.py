"""notebooks/sharded_optimizer.ipynb: what it asks for, what its ranks measure, what they refuse.

The optimizer itself is checked in ranks: tests/parallel/checks_sharded_optimizer.py.
"""

import pytest
from forked import STEPS
from notebook_cells import flat, identities, load_cells, published, rows_of_two_ranks
from tables import by, values

from a2lib.lab import ParameterError

WAYS = {
    ("plain", "bucketed"),
    ("sharded", "bucketed"),
    ("plain", "torch_ddp"),
    ("zero", "torch_ddp"),
}
SWEEPS = ("essential", "memory", "handout", "all")
# Optimizers of a reader: one is right, one updates half of the parameters and tells nobody.
OF_A_READER = """
import torch.distributed as dist

class Half(torch.optim.AdamW):
    def step(self):
        [group] = self.param_groups
        for p in group["params"][dist.get_rank() :: 2]:
            p.grad = None
        super().step()

MAKE["mine"] = lambda params, options: torch.optim.AdamW(params, **options)
MAKE["half"] = lambda params, options: Half(params, **options)
"""

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_asks_for_published_rows_each_once(gpus, name):
    gpus(2)
    cells = load_cells("sharded_optimizer", sweep=name)
    for table, tasks in ((cells.table, cells.tasks), (cells.memory_table, cells.memory_tasks)):
        asked = identities(table, tasks)
        assert published(table) == asked if name == "all" else published(table) > asked


def test_what_the_parameters_name(gpus):
    gpus(0)
    cells = load_cells("sharded_optimizer")
    asked = values(flat(cells.tasks), "optimizer", "wrapper")
    assert len(asked) == 4 and set(asked) == WAYS
    gpus(2)
    cells = load_cells("sharded_optimizer", wrappers="copy_engines", capture=True)
    [task] = cells.tasks
    assert set(values(task, "carrier", "capture")) == {("copy_engines", True)}
    with pytest.raises(ParameterError, match="torch_ddp"):
        load_cells("sharded_optimizer", capture=True, wrappers="torch_ddp")


@pytest.mark.slow
def test_what_every_rank_holds_and_sends(gpus):
    gpus(0)
    cells = load_cells("sharded_optimizer", context=8)
    rows_of_two_ranks(cells.memory_table, cells.memory_tasks, cells.measure_memory, whole=True)
    rows = cells.memory_table.frame()
    assert len(rows) == len(WAYS) * 4 * 2
    assert set(rows["status"]) == {"ok"} and set(rows["note"]) == {""}
    rows = rows.set_index(["optimizer", "wrapper", "moment", "on_rank"]).sort_index()
    for way in WAYS:
        states = list(rows.loc[(*way, "after"), "optimizer_bytes"])
        parameters = rows.loc[(*way, "init", 0), "parameter_bytes"]
        assert rows.loc[(*way, "init", 0), "optimizer_bytes"] == 0
        assert rows.loc[(*way, "before", 1), "gradient_bytes"] == parameters
        # Two moments, and a counter of four bytes for each of 21 tensors.
        every = 2 * parameters + 4 * 21
        if way[0] == "plain":
            assert states == [every, every]
        else:
            assert sum(states) == every and max(states) < 0.51 * every
        step = rows.loc[(*way, "step", 0)]
        assert step["reduced_bytes"] == pytest.approx(parameters, rel=0.01)
        exchanged = step["gathered_bytes"] + step["broadcast_bytes"]
        # PyTorch's wrapper broadcasts buffers as well.
        least = 0 if way[0] == "plain" else parameters
        assert least <= exchanged <= 1.02 * least + 1024


@pytest.mark.slow
def test_rows_of_two_ranks_with_optimizers_of_the_readers_own(gpus):
    gpus(0)
    cells = load_cells("sharded_optimizer", context=8)
    exec(OF_A_READER, cells.namespace)
    first, *others = cells.tasks
    mine, half = {**first[0], "optimizer": "mine"}, {**first[0], "optimizer": "half"}
    copied = [{**key, "carrier": "copy_engines"} for key in first]
    tasks = [[*first, mine, half], *others, copied]
    rows = rows_of_two_ranks(cells.table, tasks, cells.measure)
    rows = by(rows, "optimizer", "wrapper", "carrier")
    for name in ("plain", "sharded"):
        assert rows[name, "bucketed", "copy_engines"]["status"] == "unsupported"
    half = rows["half", "bucketed", "backend"]
    assert half["status"] == "error" and "not exchanged" in half["note"]
    for name, wrapper in (*WAYS, ("mine", "bucketed")):
        row = rows[name, wrapper, "backend"]
        assert row["status"] == "ok" and row["conditions"].endswith("cores")
        assert int(row["n"]) == STEPS
        for column in ("ms", "ms_without", "ms_optimizer"):
            assert float(row[column]) > 0

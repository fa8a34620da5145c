"""notebooks/sharded_optimizer.ipynb: what it asks for, what its ranks measure, what they refuse.

The optimizer itself is checked in ranks: tests/parallel/checks_sharded_optimizer.py.
"""

import committed
import pytest
from forked import STEPS
from notebook_cells import identities, load_cells

from a2lib.lab import ParameterError, read_section, sweep
from a2lib.lab.notebook import Run

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
        published = {table.identify(row) for row in committed.measured(table.section.name)}
        assert published == asked if name == "all" else published > asked


def test_what_the_parameters_name(gpus):
    gpus(0)
    cells = load_cells("sharded_optimizer")
    asked = [(key["optimizer"], key["wrapper"]) for task in cells.tasks for key in task]
    assert len(asked) == 4 and set(asked) == WAYS
    gpus(2)
    cells = load_cells("sharded_optimizer", wrappers="copy_engines", capture=True)
    [task] = cells.tasks
    assert {(key["carrier"], key["capture"]) for key in task} == {("copy_engines", True)}
    with pytest.raises(ParameterError, match="torch_ddp"):
        load_cells("sharded_optimizer", capture=True, wrappers="torch_ddp")


@pytest.mark.slow
def test_what_every_rank_holds_and_sends(gpus):
    gpus(0)
    cells = load_cells("sharded_optimizer", context=8)
    run = Run("sharded_optimizer", {}, {}, "cpu", "cpu")
    options = {"ranks": 2, "device": "cpu", "whole": True}
    sweep(cells.memory_table, cells.memory_tasks, cells.measure_memory, run, **options)
    rows = {}
    for row in read_section("sharded_optimizer_memory")["cpu"]:
        assert (row["status"], row["note"]) == ("ok", "")
        rows[row["optimizer"], row["wrapper"], row["moment"], int(row["on_rank"])] = row
    assert len(rows) == len(WAYS) * 4 * 2
    for way in WAYS:
        states = [int(rows[*way, "after", rank]["optimizer_bytes"]) for rank in (0, 1)]
        parameters = int(rows[*way, "init", 0]["parameter_bytes"])
        assert rows[*way, "init", 0]["optimizer_bytes"] == "0"
        assert int(rows[*way, "before", 1]["gradient_bytes"]) == parameters
        # Two moments, and a counter of four bytes for each of 21 tensors.
        every = 2 * parameters + 4 * 21
        if way[0] == "plain":
            assert states == [every, every]
        else:
            assert sum(states) == every and max(states) < 0.51 * every
        step = rows[*way, "step", 0]
        assert int(step["reduced_bytes"]) == pytest.approx(parameters, rel=0.01)
        exchanged = int(step["gathered_bytes"]) + int(step["broadcast_bytes"])
        # PyTorch's wrapper broadcasts buffers as well.
        least = 0 if way[0] == "plain" else parameters
        assert least <= exchanged <= 1.02 * least + 1024


@pytest.mark.slow
def test_rows_of_two_ranks_with_optimizers_of_the_readers_own(gpus):
    gpus(0)
    cells = load_cells("sharded_optimizer", context=8)
    exec(OF_A_READER, cells.namespace)
    of_a_reader = [{**cells.tasks[0][0], "optimizer": name} for name in ("mine", "half")]
    copied = [{**key, "carrier": "copy_engines"} for key in cells.tasks[0]]
    tasks = [[*cells.tasks[0], *of_a_reader], *cells.tasks[1:], copied]
    run = Run("sharded_optimizer", {}, {}, "cpu", "cpu")
    assert sweep(cells.table, tasks, cells.measure, run, ranks=2, device="cpu") == 0
    rows = {}
    for row in read_section("sharded_optimizer")["cpu"]:
        rows[row["optimizer"], row["wrapper"], row["carrier"]] = row
    for name in ("plain", "sharded"):
        assert rows[name, "bucketed", "copy_engines"]["status"] == "unsupported"
    half = rows["half", "bucketed", "backend"]
    assert half["status"] == "error" and "not exchanged" in half["note"]
    for name, wrapper in (*WAYS, ("mine", "bucketed")):
        row = rows[name, wrapper, "backend"]
        assert row["status"] == "ok" and row["conditions"].endswith("cores")
        assert int(row["n"]) == STEPS
        assert all(float(row[column]) > 0 for column in ("ms", "ms_without", "ms_optimizer"))

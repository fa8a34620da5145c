"""The memory of plain attention on a GPU, as the cells of notebooks/attention.ipynb count it."""

import pytest
import torch
from notebook_cells import load_cells

from a2lib.lab import memory

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh():
    memory.take_workspaces("cuda")
    memory.free_memory("cuda")


def test_counting_what_is_saved_leaves_nothing():
    sizes = {"seq_len": 1024, "head_dim": 64, "causal": True}
    cells = load_cells("attention", implementations="eager,by_hand", **sizes)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for task in cells.saved_tasks():
        list(cells.measure_saved(task))
    memory.free_memory("cuda")
    assert torch.cuda.memory_allocated() == before


def test_a_length_that_fits_runs_and_nothing_of_one_that_fails_is_held():
    cells = load_cells("attention", sweep="limit")
    key = cells.limit_keys()[0]
    assert cells.runs(key, 256)
    assert not cells.runs(key, 2**20)
    assert cells.runs(key, 256)

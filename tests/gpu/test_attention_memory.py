"""The memory of plain attention on a GPU, as the cells of notebooks/attention.ipynb count it."""

import pytest
import torch
from notebook_cells import load_cells

from a2lib.lab import memory

pytestmark = pytest.mark.gpu
SIZES = (1024, 64), (2048, 16), (4096, 128)
CASES = [(n, d, causal) for n, d in SIZES for causal in (False, True)]


@pytest.fixture(autouse=True)
def fresh():
    memory.take_workspaces("cuda")
    memory.free_memory("cuda")


def cells_of(n, d, causal, **more):
    return load_cells("attention", seq_len=n, head_dim=d, causal=causal, **more)


def test_counting_what_is_saved_leaves_nothing():
    cells = cells_of(*CASES[1], implementations="eager,by_hand")
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

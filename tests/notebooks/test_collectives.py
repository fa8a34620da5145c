"""notebooks/collectives.ipynb: what it asks for, and its rows from two ranks."""

import pytest
from notebook_cells import identities, load_cells, published, run_cells
from tables import values

OPERATIONS = "all_reduce,all_gather,reduce_scatter,broadcast"


def test_the_sweeps_ask_for_every_committed_row(gpus):
    gpus(2)
    cells = load_cells("collectives", sweep="all")
    groups = cells.keys_by_group()
    assert list(groups) == [("nccl", 2), ("gloo", 2), ("gloo", 4), ("gloo", 6)]
    for (backend, ranks), keys in groups.items():
        assert set(values(keys, "backend", "world_size")) == {(backend, ranks)}
    assert identities(cells.table, groups.values()) == published(cells.table)


@pytest.mark.slow
def test_rows_of_two_ranks_and_the_readers_own(tmp_path, monkeypatch, forked_workers):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    mine = """
MAKE["all_reduce:mine"] = lambda tensor, part: dist.all_reduce(tensor)
for operation in ("all_reduce", "all_gather", "reduce_scatter"):
    MAKE[f"{operation}:wrong"] = lambda tensor, part: None
"""
    wrong = ["all_reduce:wrong", "all_gather:wrong", "reduce_scatter:wrong"]
    asked = {"operations": OPERATIONS, "backend": "gloo"}
    added = {"operations": mine, "measure": 'BUDGET_MS["cpu"] = 1'}
    cells = run_cells("collectives", added, **asked)
    frame = cells.frame.set_index("operation")
    assert list(frame.index) == [*OPERATIONS.split(","), "all_reduce:mine", *wrong]
    assert frame.loc[wrong, "note"].str.startswith("wrong result on ranks").all()
    right = frame.drop(wrong)
    assert set(right["status"]) == {"ok"} and set(right["size"]) == {2**20}
    for row in right.itertuples():
        assert 0 < row.ms_rank_min <= row.ms_rank_median <= row.ms_rank_max
        assert row.conditions.endswith("cores") and row.n >= 5
    # An all-reduce of two ranks sends as many bytes as it has.
    assert right.loc["all_reduce", "bus, GB/s"] == right.loc["all_reduce", "algorithm, GB/s"]
    assert frame.loc["all_gather", "bus, GB/s"] == frame.loc["all_gather", "algorithm, GB/s"] / 2


def test_every_rank_has_an_equal_part():
    cells = load_cells("collectives")
    key = {"dtype": "bf16", "size": 4100, "world_size": 3}
    tensor, part = cells.tensors(key, "cpu")
    assert part.nbytes == 1368 and tensor.nbytes == 3 * 1368


@pytest.fixture
def alone(monkeypatch):
    """Return the cells, of whose two ranks only one is there, and is asked as if it were all."""
    cells = load_cells("collectives")
    monkeypatch.setitem(cells.namespace, "everyone", lambda value: [value])
    return cells


def key_of(operation, size):
    key = {"operation": operation, "backend": "gloo", "world_size": 2}
    return {**key, "dtype": "fp32", "size": size}


def test_what_the_memory_does_not_hold_is_not_tried(alone):
    (row,) = alone.measure([key_of("all_reduce", 2**46)])
    assert row["status"] == "oom" and row["note"].startswith("would take 422")


@pytest.mark.gpu
def test_rows_of_two_gpus(tmp_path, monkeypatch):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    for dtype in ("fp32", "bf16"):
        asked = {"operations": OPERATIONS, "dtype": dtype, "megabytes": 1, "backend": "nccl"}
        frame = run_cells("collectives", **asked).frame
        assert set(frame["status"]) == {"ok"} and (frame["ms_queued"] > 0).all()

"""The cells of notebooks/benchmark.ipynb at the smallest size: the rows that they yield."""

import pytest
from notebook_cells import load_cells

from a2lib import lab
from a2lib.shapes import Shape


@pytest.fixture
def cells(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    return lambda **parameters: load_cells("benchmark", **parameters)


def columns(table, row):
    """Return the columns of a row that the table has, beside what a sweep adds."""
    assert set(row) <= set(table.columns), set(row) - set(table.columns)
    return {column for column, value in row.items() if value is not None}


def test_every_phase_of_a_case_has_its_row(cells):
    ns = cells(context="8", steps=2, warmup=1)
    (keys,) = ns.tasks
    rows = list(ns.measure(keys))
    phases = ["forward", "loss", "backward", "optimizer", "step", "wall"]
    assert [row["phase"] for row in rows] == phases
    for row in rows:
        values = {"ms", "ms_mean", "ms_std", "ms_min", "ms_p20", "ms_p80", "n"}
        assert columns(ns.times, row) == {*ns.times.key, *values}
        assert (row["model"], row["context"], row["warmup"], row["n"]) == ("tiny", 8, 1, 2)
    assert rows[4]["ms"] <= rows[5]["ms"]


def test_an_attention_and_a_size_of_the_readers_are_measured_in_a_worker(cells, forked_workers):
    def mine(q, k, v):
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    ns = cells(context="8", steps=1, warmup=0)
    ns.ATTENTION["mine"], ns.sizes["wide"] = mine, Shape(16, 16, 1, 2, vocab_size=11)
    case = {**ns.asked[0], "attention": "mine", "model": "wide", "warmup": 0}
    tasks = [[{**case, "phase": phase} for phase in ns.phases(case)]]
    run = lab.start("benchmark", vars(ns))
    assert lab.sweep(ns.times, tasks, ns.measure, run, whole=True) == 0
    rows = ns.times.rows()
    assert [(row["attention"], row["status"]) for row in rows] == [("mine", "ok")] * 6, rows


def test_energy_is_blank_where_no_driver_tells_it(cells):
    ns = cells(sweep="power")
    (row,) = ns.measure_power(ns.power_tasks[0])
    assert columns(ns.powers, row) >= {*ns.powers.key, "ms", "ms_mean", "n"}
    (row,) = ns.measure_power(ns.load_tasks[1])
    assert row["weights"] == "zero" and columns(ns.loads, row) >= {*ns.loads.key, "ms_mean"}


@pytest.mark.slow
def test_a_first_step_is_taken_apart_in_processes_that_have_not_imported_torch(cells):
    ns = cells(sweep="first")
    nothing, block = ns.first_tasks
    parts = {"import", "first", "second", "steady"}
    assert {key["part"] for key in nothing} == parts
    run = lab.start("benchmark", vars(ns))
    options = {"whole": True, "fresh": True}
    assert lab.sweep(ns.firsts, [block], ns.measure_first, run, **options) == 0
    rows = ns.firsts.rows()
    assert {row["status"] for row in rows} == {"ok"}, rows
    assert {row["part"] for row in rows} == {*parts, "block_first", "block_second"}

"""The cells of notebooks/benchmark.ipynb at the smallest size: the rows that they yield."""

import pandas as pd
import pytest
from notebook_cells import load_cells
from tables import values

from a2lib import lab
from a2lib.shapes import Shape


@pytest.fixture
def cells(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    return lambda **parameters: load_cells("benchmark", **parameters)


def filled(table, row):
    """Return the columns in which a row has something; the table has them all."""
    assert set(row) <= set(table.columns), set(row) - set(table.columns)
    return set(pd.Series(row, dtype=object).dropna().index)


def test_every_phase_of_a_case_has_its_row(cells):
    ns = cells(context="8", steps=2, warmup=1)
    (keys,) = ns.tasks
    rows = list(ns.measure(keys))
    phases = ["forward", "loss", "backward", "optimizer", "step", "wall"]
    assert values(rows, "phase") == phases
    results = {"ms", "ms_mean", "ms_std", "ms_min", "ms_p20", "ms_p80", "n"}
    for row in rows:
        assert filled(ns.times, row) == {*ns.times.key, *results}
        assert (row["model"], row["context"], row["warmup"], row["n"]) == ("tiny", 8, 1, 2)
    assert rows[4]["ms"] <= rows[5]["ms"]


def test_an_attention_and_a_size_of_the_readers_are_measured_in_a_worker(cells, forked_workers):
    def mine(q, k, v):
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    ns = cells(context="8", steps=1, warmup=0)
    ns.ATTENTION["mine"], ns.sizes["wide"] = mine, Shape(16, 16, 1, 2, vocab_size=11)
    case = {**ns.asked[0], "attention": "mine", "model": "wide", "warmup": 0}
    task = [{**case, "phase": phase} for phase in ns.phases(case)]
    run = lab.start("benchmark", vars(ns))
    assert lab.sweep(ns.times, [task], ns.measure, run, whole=True) == 0
    rows = ns.times.rows()
    assert values(rows, "attention", "status") == [("mine", "ok")] * 6, rows


def test_energy_is_blank_where_no_driver_tells_it(cells):
    ns = cells(sweep="power")
    (row,) = ns.measure_power(ns.power_tasks[0])
    assert filled(ns.powers, row) >= {*ns.powers.key, "ms", "ms_mean", "n"}
    (row,) = ns.measure_power(ns.load_tasks[1])
    assert row["weights"] == "zero" and filled(ns.loads, row) >= {*ns.loads.key, "ms_mean"}


@pytest.mark.slow
def test_a_first_step_is_taken_apart_in_processes_that_have_not_imported_torch(cells):
    ns = cells(sweep="first")
    nothing, block = ns.first_tasks
    parts = {"import", "first", "second", "steady"}
    assert set(values(nothing, "part")) == parts
    run = lab.start("benchmark", vars(ns))
    options = {"whole": True, "fresh": True}
    assert lab.sweep(ns.firsts, [block], ns.measure_first, run, **options) == 0
    rows = ns.firsts.rows()
    assert set(values(rows, "status")) == {"ok"}, rows
    assert set(values(rows, "part")) == {*parts, "block_first", "block_second"}

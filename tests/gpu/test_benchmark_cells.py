"""The cells of notebooks/benchmark.ipynb that no CPU reaches: captures, first steps, energy."""

import pytest
from notebook_cells import load_cells

from a2lib import lab

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TINY = {"model": "tiny", "context": 128}


def smaller(task, sizes):
    """Return a task's keys with these sizes in place of their own."""
    return [{**key, **sizes} for key in task]


@pytest.fixture
def cells(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path))
    return load_cells("benchmark", sweep="all", steps=2)


def test_a_captured_case_has_the_whole_step_alone(cells):
    case = {**cells.PLAIN, **TINY, "capture": True, "warmup": 3}
    keys = []
    for phase in cells.phases(case):
        keys.append({**case, "phase": phase})
    rows = list(cells.measure(keys))
    assert [row["phase"] for row in rows] == ["step", "wall"]
    for row in rows:
        assert row["ms"] > 0 and row["peak_bytes"] > 0, row


def test_every_preparation_of_a_first_step_has_its_parts(cells):
    tasks = []
    for task in cells.first_tasks:
        if task[0]["model"] == "small" and task[0]["repeat"] == 0:
            tasks.append(smaller(task, TINY))
    run = lab.start("benchmark", vars(cells))
    lab.sweep(cells.firsts, tasks, cells.measure_first, run, whole=True, fresh=True)
    rows = cells.firsts.rows()
    prepared, parts = {"none": set(), "blocks": set()}, set()
    for row in rows:
        assert row["status"] == "ok", (row["prepared"], row["note"])
        prepared[row["compile"]].add(row["prepared"])
        parts.add(row["part"])
    assert prepared["none"] == {"nothing", "product", "block", "memory", "modules"}
    assert prepared["blocks"] == {"nothing", "cached"}
    assert parts >= {"context", "product", "block_first", "memory"}


def test_the_energy_of_a_step(cells, monkeypatch):
    # Steps of a millisecond: the driver's counter moves in tenths of a second.
    monkeypatch.setitem(cells.measure_power.__globals__, "MEASURED", 3000)
    (row,) = cells.measure_power([{**cells.power_tasks[0][0], **TINY}])
    assert row["ms"] > 0 and row["joules"] > 0 and row["power_limit_w"] > 0

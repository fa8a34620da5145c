"""notebooks/memory.ipynb through papermill, at the smallest size."""

import csv

import pytest
from notebook_texts import texts


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("memory", "-p", "context", 8, "-p", "batch", 2)


def test_rows_and_pictures_are_stored_under_their_run(executed):
    _, measured = executed
    found = {}
    for section in ("memory", "memory_recording", "memory_block"):
        with open(measured / section / "cpu.csv", newline="") as file:
            found[section] = list(csv.DictReader(file))
    assert {r["status"] for rows in found.values() for r in rows} == {"ok"}
    assert [len(rows) for rows in found.values()] == [2 * 5, 2, 1]
    runs = {r["run"] for rows in found.values() for r in rows}
    assert len(runs) == 1
    pictures = sorted(p.parent.parent.name for p in measured.glob("bulk/*/cpu/*.csv"))
    assert pictures == ["largest"] * 2 + ["lines"] * 2 + ["memory"] * 2 + ["saved"]


def test_it_prints_its_tables_and_shows_its_figure_once(executed):
    outputs = [output for cell in executed[0].cells for output in cell.get("outputs", ())]
    printed = "".join(texts(executed[0]))
    assert "tensors made" in printed and "by hooks" in printed
    assert "measured/memory_block/cpu.csv" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1

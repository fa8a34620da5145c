"""notebooks/collectives.ipynb through papermill, with two processes and one size."""

import csv

import pytest


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("collectives", "-p", "operations", "broadcast", "-p", "world_size", 2)


def test_rows_are_stored_under_their_run(executed):
    _, measured = executed
    with open(measured / "collectives" / "cpu.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    key = [row[c] for c in ("operation", "backend", "world_size", "dtype", "size", "status")]
    assert key == ["broadcast", "gloo", "2", "fp32", str(2**20), "ok"] and row["run"] == run["run"]
    assert run["command"] == "papermill notebooks/collectives.ipynb -p operations broadcast"


def test_it_prints_its_table_and_shows_its_figure_once(executed):
    outputs = [output for cell in executed[0].cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "broadcast" in printed and "measured/collectives/cpu.csv" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1

"""notebooks/ddp.ipynb through papermill, with two processes and one way."""

import csv

import pytest


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("ddp", "-p", "wrappers", "flat", "-p", "context", 8)


def test_rows_are_stored_under_their_run(executed):
    _, measured = executed
    with open(measured / "ddp" / "cpu.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    key = [row[c] for c in ("wrapper", "model", "context", "backend", "world_size", "status")]
    assert key == ["flat", "tiny", "8", "gloo", "2", "ok"] and row["run"] == run["run"]
    assert run["command"] == "papermill notebooks/ddp.ipynb -p wrappers flat -p context 8"


def test_it_prints_its_table_and_shows_its_figure_once(executed):
    outputs = [output for cell in executed[0].cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "tiny launched, batch 2, context 8, fp32, 2 ranks of gloo" in printed
    assert "measured/ddp/cpu.csv" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1

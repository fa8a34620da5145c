"""notebooks/checkpointing.ipynb through papermill, at the smallest size."""

import csv

import pytest
from notebook_texts import texts


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("checkpointing", "-p", "strategies", "none,chain", "-p", "steps", 2)


def test_rows_are_stored_under_their_run(executed):
    _, measured = executed
    with open(measured / "checkpointing" / "cpu.csv", newline="") as file:
        found = list(csv.DictReader(file))
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    assert {(r["strategy"], r["status"], r["n"], r["run"]) for r in found} == {
        (strategy, "ok", "2", run["run"]) for strategy in ("none", "chain")
    }
    assert run["command"] == (
        "papermill notebooks/checkpointing.ipynb -p strategies none,chain -p steps 2"
    )


def test_it_prints_its_table_and_shows_its_figure_once(executed):
    outputs = [output for cell in executed[0].cells for output in cell.get("outputs", ())]
    printed = "".join(texts(executed[0]))
    assert "time and memory of a step" in printed and "measured/checkpointing/cpu.csv" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1

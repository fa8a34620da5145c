"""notebooks/benchmark.ipynb through papermill, at the smallest size."""

import csv

import pytest


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("benchmark", "-p", "context", 8, "-p", "warmup", 0, "-p", "steps", 2)


def test_rows_are_stored_under_their_run(executed):
    _, measured = executed
    with open(measured / "benchmark" / "cpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    assert {(row["phase"], row["status"], row["n"]) for row in rows} == {
        (phase, "ok", "2") for phase in ("forward", "loss", "backward", "optimizer", "step", "wall")
    }
    assert {(r["model"], r["context"], r["warmup"], r["run"]) for r in rows} == {
        ("tiny", "8", "0", run["run"])
    }
    assert run["command"] == (
        "papermill notebooks/benchmark.ipynb -p context 8 -p warmup 0 -p steps 2"
    )


def test_it_prints_its_table_and_where_the_rows_are(executed):
    notebook, _ = executed
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert "tiny 8 train-step fp32 eager" in printed and printed.count("±") == 6
    assert "-p sweep warmup" in printed and "-p sweep first" in printed
    assert "Nothing measured yet." in printed
    assert "measured/benchmark/cpu.csv" in printed

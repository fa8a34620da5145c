"""notebooks/benchmark.ipynb through papermill, at the smallest size."""

import csv

import pytest
from notebook_texts import texts


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
    printed = "".join(texts(executed[0]))
    assert "tiny 8 train-step fp32 eager" in printed
    assert printed.count(" ± ") + printed.count(" (median)") == 6  # one for each phase
    assert "peak, GB" not in printed  # which a CPU does not count
    assert "-p sweep warmup" in printed and "-p sweep first" in printed
    assert "measured/benchmark/cpu.csv" in printed

"""notebooks/collectives.ipynb through papermill, with two processes and one size."""

import csv

import pytest
from notebook_texts import texts

from a2lib.theory.latency import OPERATIONS


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("collectives", "-p", "operations", ",".join(OPERATIONS), "-p", "world_size", 2)


def test_rows_are_stored_under_their_run(executed):
    _, measured = executed
    with open(measured / "collectives" / "cpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    assert {row["operation"] for row in rows} == set(OPERATIONS) and len(rows) == len(OPERATIONS)
    for row in rows:
        key = [row[c] for c in ("backend", "world_size", "dtype", "size", "status", "run")]
        assert key == ["gloo", "2", "fp32", str(2**20), "ok", run["run"]]
        columns = ("ms_rank_min", "ms_rank_median", "ms_rank_max")
        times = [float(row[column]) for column in columns]
        assert times == sorted(times) and 0 < times[0] and times[-1] <= float(row["ms_p80"])
        assert row["ms_queued"] == "" and row["conditions"].endswith("cores") and int(row["n"]) >= 5
    command = f"papermill notebooks/collectives.ipynb -p operations {','.join(OPERATIONS)}"
    assert run["command"] == command


def test_it_prints_its_table_and_shows_its_figure_once(executed):
    outputs = [output for cell in executed[0].cells for output in cell.get("outputs", ())]
    printed = "".join(texts(executed[0]))
    assert "broadcast" in printed and "measured/collectives/cpu.csv" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1

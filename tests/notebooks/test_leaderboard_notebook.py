"""notebooks/leaderboard.ipynb through papermill, with two processes and a tiny model."""

import csv

import pytest
from notebook_texts import texts

WAYS = ("recomputed", "fused_head", "offloaded")


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("leaderboard", "-p", "ways", ",".join(WAYS), "-p", "rep_ms", 3000)


def test_rows_are_stored_under_their_run(executed):
    _, measured = executed
    with open(measured / "leaderboard" / "cpu.csv", newline="") as file:
        rows = {row["way"]: row for row in csv.DictReader(file)}
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    assert set(rows) == set(WAYS)
    for row in rows.values():
        key = [row[c] for c in ("model", "layers", "backend", "world_size", "dtype", "status")]
        assert key == ["tiny", "4", "gloo", "2", "fp32", "ok"] and row["run"] == run["run"], row
        assert row["loss"] == rows["recomputed"]["loss"]
        assert float(row["gradient_norm"]) == pytest.approx(
            float(rows["recomputed"]["gradient_norm"]), rel=1e-4
        )
        assert float(row["ms_ready"]) > float(row["ms"]) > 0
        assert (int(row["host_bytes"]) > 0) is (row["way"] == "offloaded")
    again = [rows[way]["products_again"] for way in WAYS]
    assert again == ["", "20", "0"]


def test_it_prints_its_table_and_shows_its_figure_once(executed):
    outputs = [output for cell in executed[0].cells for output in cell.get("outputs", ())]
    printed = "".join(texts(executed[0]))
    assert "offloaded" in printed and "products again" in printed
    assert "measured/leaderboard/cpu.csv" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1

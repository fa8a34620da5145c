"""notebooks/ddp.ipynb through papermill, with two processes: ours in buckets, and PyTorch's."""

import csv

import pytest
from notebook_texts import texts

from a2lib.experiments.data_parallel.turns import FEWEST, TURNS
from a2lib.measure import bulk


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    asked = {"wrappers": "bucketed,torch_ddp", "bucket_mb": 100, "context": 8}
    return execute("ddp", *(word for pair in asked.items() for word in ("-p", *pair)))


@pytest.fixture(scope="module")
def rows(executed):
    with open(executed[1] / "ddp" / "cpu.csv", newline="") as file:
        return {row["wrapper"]: row for row in csv.DictReader(file)}


def test_rows_are_stored_under_their_run(executed, rows):
    with open(executed[1] / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    assert set(rows) == {"bucketed", "torch_ddp"}
    for row in rows.values():
        columns = ("model", "context", "bucket_mb", "backend", "world_size", "status")
        assert [row[c] for c in columns] == ["tiny", "8", "100", "gloo", "2", "ok"], row
        assert row["run"] == run["run"] and int(row["n"]) >= TURNS * FEWEST
    assert run["command"] == (
        "papermill notebooks/ddp.ipynb -p wrappers bucketed,torch_ddp -p bucket_mb 100 -p context 8"
    )


def test_a_row_has_its_parts_and_the_ranks_apart(rows):
    for row in rows.values():
        ranks = [float(row[f"ms_rank_{one}"]) for one in ("min", "median", "max")]
        assert ranks == sorted(ranks) and ranks[0] > 0
        base = [float(row[f"ms_without{one}"]) for one in ("_p20", "", "_p80")]
        assert base == sorted(base) and base[0] > 0
        assert float(row["ms_backward_without"]) > 0 and row["ms_host"] == ""
    # PyTorch's cannot send without a backward.
    assert float(rows["bucketed"]["ms_communication"]) > 0
    assert rows["torch_ddp"]["ms_communication"] == ""
    assert int(rows["bucketed"]["sent_bytes"]) == int(rows["torch_ddp"]["sent_bytes"]) > 0


def test_ours_in_large_buckets_is_drawn(executed, rows):
    data = executed[1].parent
    assert bulk.pictures("strip", data) == [("cpu", "ddp-tiny-bucketed-100-MB-2-ranks")]
    drawn = bulk.read("strip", "cpu", "ddp-tiny-bucketed-100-MB-2-ranks", data)
    assert drawn.run == rows["bucketed"]["run"] and drawn.about["wrapper"] == "bucketed"
    assert "backward" in {row["phase"] for row in drawn.rows}


def test_it_prints_its_table_and_shows_its_figure_once(executed):
    outputs = [output for cell in executed[0].cells for output in cell.get("outputs", ())]
    printed = "".join(texts(executed[0]))
    assert "context 8, precision fp32" in printed and "exposed" in printed
    assert "measured/ddp/cpu.csv" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1

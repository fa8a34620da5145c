"""notebooks/profile.ipynb through papermill, at the smallest size: a trace by torch.profiler."""

import csv

import pytest
from notebook_texts import texts

from a2lib.measure import bulk

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    return execute("profile", "-p", "context", 8)


def test_rows_and_pictures_are_stored_under_their_run(executed):
    _, measured = executed
    with open(measured / "profile" / "cpu.csv", newline="") as file:
        rows = {row["phase"]: row for row in csv.DictReader(file)}
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    assert set(rows) == {"forward", "loss", "backward", "optimizer", "step"}
    assert {(r["status"], r["profiler"], r["n"], r["run"]) for r in rows.values()} == {
        ("ok", "torch", "3", run["run"])
    }
    assert float(rows["step"]["no_class_percent"]) <= 2
    name = "tiny-8-4-train-step-fp32-eager-none-torch"
    found = bulk.read("kernels", "cpu", name, measured.parent)
    assert found.run == run["run"]
    # Two blocks and the head: 2 * 7 + 1 linear layers, two products of attention each.
    products = {p: sum(r["calls"] for r in found.rows if (r["phase"], r["kind"]) == (p, "matmul"))
                for p in ("forward", "backward")}  # fmt: skip
    assert products == {"forward": 19, "backward": 38}


def test_it_says_who_traced_and_shows_kernels(executed):
    notebook, _ = executed
    printed = "".join(texts(executed[0]))
    assert "traced by torch.profiler: the operators" in printed
    assert printed.count("tiny 8 train-step fp32 eager by torch") == 2
    assert "aten::mm" in printed and "measured/profile/cpu.csv" in printed
    (figure,) = (cell for cell in notebook.cells if "profile.draw" in cell.source)
    assert "image/png" in figure.outputs[0].data

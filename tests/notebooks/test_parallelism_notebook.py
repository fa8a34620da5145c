"""notebooks/parallelism.ipynb through papermill, with two processes and tiny layers."""

import csv

import pytest
from notebook_texts import texts


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured."""
    sizes = {"tokens": 16, "d_model": 16, "d_ff": 32, "layers": 2}
    return execute("parallelism", *(x for name in sizes for x in ("-p", name, sizes[name])))


def test_rows_are_stored_under_their_run(executed):
    _, measured = executed
    with open(measured / "parallelism" / "cpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    asked = {("dp", "2x1"), ("fsdp", "2x1"), ("tp", "1x2")}
    passes = ("forward", "backward", "end_to_end")
    assert {(r["scheme"], r["mesh"], r["pass"]) for r in rows} == {
        (*one, pass_) for one in asked for pass_ in passes
    }
    for row in rows:
        key = [row[c] for c in ("backend", "world_size", "dtype", "d_model", "d_ff", "status")]
        assert key == ["gloo", "2", "fp32", "16", "32", "ok"] and row["run"] == run["run"], row
        assert float(row["ms_without"]) > 0 and int(row["n"]) >= 5
        sends = (row["scheme"], row["pass"]) != ("dp", "forward")
        assert bool(row["ms_communication"]) is sends and row["ms_data"] == ""
        assert row["conditions"].endswith("cores")


def test_it_prints_its_table_and_shows_its_figure_once(executed):
    outputs = [output for cell in executed[0].cells for output in cell.get("outputs", ())]
    printed = "".join(texts(executed[0]))
    assert "tp 1x2, d_ff 32, d_model 16, 2 layers, fp32, 2 ranks of gloo" in printed
    assert "measured/parallelism/cpu.csv" in printed and "Do the formulas hold?" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1

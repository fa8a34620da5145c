"""notebooks/compile.ipynb through papermill, at the smallest size."""

import csv

import pytest
from notebook_texts import texts

ASKED = ["-p", "seq_len", "8", "-p", "head_dim", "4", "-p", "batch", "1", "-p", "model", "none"]


@pytest.fixture(scope="module")
def executed(execute):
    """The executed notebook, and where it measured. A whole model would take a minute."""
    # Seconds of the C++ compiler for each empty cache, which are measured and not tested.
    return execute("compile", *ASKED, TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0")


@pytest.mark.slow
def test_rows_are_stored_under_their_run(executed):
    _, measured = executed
    with open(measured / "compile_attention" / "cpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    assert {(r["implementation"], r["pass"], r["status"]) for r in rows} == {
        (name, pass_, "ok") for name in ("eager", "compile") for pass_ in ("forward", "backward")
    }
    assert {(r["written"], r["seq_len"], r["head_dim"], r["run"]) for r in rows} == {
        ("plain", "8", "4", run["run"])
    }
    made = {r["pass"]: r for r in rows if r["implementation"] == "compile"}
    assert [made[p]["kernels_called"] for p in ("forward", "backward")] == ["1", "1"]
    assert [made[p]["library_calls"] for p in ("forward", "backward")] == ["2", "4"]
    assert not list(measured.glob("compile_model/*.csv"))


@pytest.mark.slow
def test_it_prints_its_table_and_where_the_rows_are(executed):
    notebook, _ = executed
    printed = "".join(texts(executed[0]))
    assert printed.count("plain fp32 8x4") == 4
    assert "No model is asked for here" in printed
    assert "measured/compile_attention/cpu.csv" in printed
    (figure,) = (cell for cell in notebook.cells if "compiling.draw" in cell.source)
    assert "image/png" in figure.outputs[0].data

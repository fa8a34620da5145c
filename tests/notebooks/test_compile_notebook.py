"""notebooks/compile.ipynb through papermill, at the smallest size."""

import csv
import os
import subprocess
import sys

import nbformat
import pytest

from a2lib.experiments.compile.settings import Parameters
from a2lib.experiments.harness.parameters import cell_source
from a2lib.paths import ROOT

COMPILE = ROOT / "notebooks" / "compile.ipynb"
ASKED = ["-p", "seq_len", "8", "-p", "head_dim", "4", "-p", "batch", "1", "-p", "model", "none"]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The executed notebook, and where it measured. A whole model would take a minute."""
    folder = tmp_path_factory.mktemp("compile")
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"A2LIB_DATA": str(folder / "data"), "A2LIB_LOCKS": str(folder / "locks")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Seconds of the C++ compiler for each empty cache, which are measured and not tested.
    environment |= {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "papermill", COMPILE, folder / "out.ipynb", *ASKED],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return nbformat.read(folder / "out.ipynb", as_version=4), folder / "data" / "measured"


def test_the_cell_is_the_dataclass():
    cells = nbformat.read(COMPILE, as_version=4).cells
    (cell,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", ())]
    assert cell.source == cell_source(Parameters)


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
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert printed.count("plain fp32 8x4") == 4
    assert "No model is asked for here" in printed
    assert "measured/compile_attention/cpu.csv" in printed
    (figure,) = (cell for cell in notebook.cells if "compiling.draw" in cell.source)
    assert "image/png" in figure.outputs[0].data

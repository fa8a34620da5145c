"""notebooks/benchmark.ipynb through papermill, at the smallest size."""

import csv
import os
import subprocess
import sys

import nbformat
import pytest

from a2lib.experiments.benchmark.configurations import Parameters
from a2lib.experiments.harness.parameters import cell_source
from a2lib.paths import ROOT

BENCHMARK = ROOT / "notebooks" / "benchmark.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The executed notebook, and where it measured."""
    folder = tmp_path_factory.mktemp("benchmark")
    asked = ["-p", "context", "8", "-p", "warmup", "0", "-p", "steps", "2"]
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"A2LIB_DATA": str(folder / "data"), "A2LIB_LOCKS": str(folder / "locks")}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "papermill", BENCHMARK, folder / "out.ipynb", *asked],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return nbformat.read(folder / "out.ipynb", as_version=4), folder / "data" / "measured"


def test_the_cell_is_the_dataclass():
    cells = nbformat.read(BENCHMARK, as_version=4).cells
    (cell,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", ())]
    assert cell.source == cell_source(Parameters)


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

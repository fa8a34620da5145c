"""notebooks/mixed_precision.ipynb through papermill, as a reader runs it, at the smallest size."""

import csv
import os
import re
import subprocess
import sys

import pytest
from notebook_texts import texts

from a2lib.paths import ROOT

NOTEBOOK = ROOT / "notebooks" / "mixed_precision.ipynb"


def papermill(*arguments, data):
    environment = {**os.environ, "A2LIB_DATA": str(data), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "papermill", NOTEBOOK, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def executed(execute):
    notebook, measured = execute("mixed_precision", "-p", "terms", 50, "-p", "features", 16)
    return "\n".join(texts(notebook)), notebook, measured


def test_it_prints_results_beside_predictions(executed):
    shown, _, _ = executed
    assert len(re.findall(r"^50 x 0\.2: \S+ \+= .* yes ", shown, re.M)) == 7
    assert re.search(r"^ln output +fp32 +fp16 +bf16 *$", shown, re.M)
    assert re.search(r"^eps +1e-08 +fp16 +0 +1e-08 *$", shown, re.M)
    assert "layernorm/cpu.csv" in shown and "Mixed precision" in shown


def test_it_stores_every_row_with_its_run_and_draws(executed):
    _, notebook, measured = executed
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    assert run["command"] == "papermill notebooks/mixed_precision.ipynb -p terms 50 -p features 16"
    for section, n in (("accumulation", 7), ("autocast_dtypes", 39), ("layernorm", 137)):
        with open(measured / section / "cpu.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == n and {(r["status"], r["run"]) for r in rows} == {("ok", run["run"])}
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_a_wrong_parameter_stops_before_anything_runs(tmp_path):
    done = papermill(tmp_path / "o.ipynb", "-p", "terms", 0, data=tmp_path / "data")
    assert done.returncode != 0
    assert done.stderr.rstrip().splitlines()[-1].startswith("ParameterError: terms = 0: must be")
    assert not (tmp_path / "data").exists()

"""notebooks/flash.ipynb through papermill, as a reader runs it, at the smallest size."""

import ast
import csv
import json
import os
import re
import subprocess
import sys

import nbformat
import pytest
from notebook_texts import texts

from a2lib.experiments.flash.shapes import DTYPES, Parameters
from a2lib.experiments.harness.parameters import cell_source
from a2lib.paths import ROOT
from a2lib.theory.attention import PASSES

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FLASH = ROOT / "notebooks" / "flash.ipynb"
LOCAL_PATH = re.compile(r"(?<![\w.~/$<-])/\w[\w.-]*/")


def papermill(*arguments, data, cwd=ROOT):
    environment = {
        **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        "A2LIB_DATA": str(data),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [sys.executable, "-m", "papermill", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


def tagged(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_notebook_declares_its_parameters(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    (cell,) = tagged(notebook, "parameters")
    for line, node in zip(cell.source.splitlines(), ast.parse(cell.source).body, strict=True):
        assert isinstance(node, ast.AnnAssign), f"{line}: annotate it"
        ast.literal_eval(node.value)
        assert re.search(r"  # \S", line), f"{line}: say what it is"
    assert notebook.metadata.kernelspec.name == "python3"
    assert "papermill" not in notebook.metadata and not tagged(notebook, "injected-parameters")
    for found in notebook.cells:
        for output in found.get("outputs", ()):
            assert output.output_type != "error"
    assert not LOCAL_PATH.search("\n".join(texts(notebook)))


def test_cells_only_call_the_experiment():
    for cell in nbformat.read(FLASH, as_version=4).cells:
        if cell.cell_type == "code" and "parameters" not in cell.metadata.get("tags", ()):
            kinds = {type(node) for node in ast.walk(ast.parse(cell.source))}
            assert not kinds & {ast.FunctionDef, ast.For, ast.If, ast.ClassDef, ast.With}


def test_help_notebook_documents_every_parameter(tmp_path):
    done = papermill("--help-notebook", FLASH, data=tmp_path)
    assert done.returncode == 0
    for line in cell_source(Parameters).splitlines():
        declaration, comment = line.split("  # ")
        name, kind = re.match(r"(\w+): (\w+) =", declaration).groups()
        assert f"{name}: {kind} (default" in done.stdout and comment in done.stdout


# One execution each: a name, a length and a word. tests/experiments has the rest.
@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("seqlen", "512", "did you mean seq_len"),
        ("seq_len", "-512", "a whole number from 1 to"),
        ("dtype", "float8", ", ".join(DTYPES)),
    ],
)
def test_a_wrong_parameter_stops_before_anything_runs(tmp_path, name, value, allowed):
    out = tmp_path / "out.ipynb"
    done = papermill(FLASH, out, "-p", name, value, data=tmp_path / "data")
    assert done.returncode != 0
    (line,) = {s for s in done.stderr.splitlines() if s.startswith("ParameterError")}
    assert name in line and allowed in line
    assert done.stderr.rstrip().splitlines()[-1] == line and "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook run from its own folder, as JupyterLab does, and where it measured."""
    folder = tmp_path_factory.mktemp("flash")
    asked = ["-p", "seq_len", 32, "-p", "head_dim", 16, "-p", "heads", 1e0]
    asked += ["-p", "implementations", "eager,tiled,sdpa_cudnn"]
    done = papermill(
        "flash.ipynb", folder / "out.ipynb", *asked, data=folder / "data", cwd=FLASH.parent
    )
    assert done.returncode == 0, done.stderr
    return nbformat.read(folder / "out.ipynb", as_version=4), folder / "data" / "measured"


def test_rows_are_stored_under_their_run(executed):
    _, measured = executed
    with open(measured / "flash" / "cpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with open(measured / "runs.csv", newline="") as file:
        (run,) = csv.DictReader(file)
    assert {(row["implementation"], row["pass"]): row["status"] for row in rows} == {
        (name, p): "unsupported" if name == "sdpa_cudnn" else "ok"
        for name in ("eager", "tiled", "sdpa_cudnn")
        for p in PASSES
    }
    assert {row["run"] for row in rows} == {run["run"]}
    assert {(row["seq_len"], row["head_dim"], row["dtype"]) for row in rows} == {
        ("32", "16", "fp32")
    }
    assert run["command"] == (
        "papermill notebooks/flash.ipynb -p seq_len 32 -p head_dim 16"
        " -p implementations eager,tiled,sdpa_cudnn"
    )
    assert json.loads(run["parameters"])["seq_len"] == 32
    assert (measured / "ceiling" / "cpu.csv").exists()


def test_it_shows_a_table_a_figure_and_one_line_of_progress(executed):
    notebook, measured = executed
    shown = list(texts(notebook))
    (table,) = [text for text in shown if "median time, ms" in text]
    assert re.search(r"eager +[\d.]+ +[\d.]+ +[\d.]+", table)
    assert any("sdpa_cudnn: unsupported" in text for text in shown)
    kinds = [
        kind for c in notebook.cells for o in c.get("outputs", ()) for kind in o.get("data", {})
    ]
    assert kinds.count("image/png") == 1 and kinds.count("text/html") == 2
    (bar,) = [text for text in shown if " 9/9 rows " in text]
    assert "100%" in bar and "\r" not in bar and "\n" not in bar
    assert any("CPU" in text for text in shown)
    assert any("flash/cpu.csv" in text and "make book" in text for text in shown)


def test_without_a_gpu_there_is_one_time_and_it_says_so(executed):
    shown = list(texts(executed[0]))
    for what in ("GPU's own time", "host's time to issue a call"):
        assert any(what in text and "is measured on a GPU alone" in text for text in shown)
    assert sum("sweeps leaderboard and all" in text for text in shown) == 3


@pytest.mark.slow
def test_the_leaderboard_sweep_has_the_protocols_and_the_errors(tmp_path):
    asked = ["-p", "sweep", "leaderboard", "-p", "implementations", "eager,sdpa_flash"]
    done = papermill(FLASH, tmp_path / "out.ipynb", *asked, data=tmp_path / "data")
    assert done.returncode == 0, done.stderr
    shown = "\n".join(texts(nbformat.read(tmp_path / "out.ipynb", as_version=4)))
    assert re.search(r"burst +eager +[\d.]+", shown)
    assert re.search(r"sustained, second 0 +sdpa_flash +[\d.]+", shown)
    assert re.search(r"board +eager +unsupported", shown)
    assert re.search(r"bf16 causal +10 +eager( +\d\.\d\de-\d\d){4}", shown)
    measured = tmp_path / "data" / "measured"
    with open(measured / "flash_accuracy" / "cpu.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2 * 2 * 4 and {row["status"] for row in rows} == {"ok"}
    with open(measured / "flash_protocol" / "cpu.csv", newline="") as file:
        found = {(row["protocol"], row["implementation"]) for row in csv.DictReader(file)}
    assert len(found) == 3 * 2
    with open(measured / "flash_counters" / "cpu.csv", newline="") as file:
        assert {row["status"] for row in csv.DictReader(file)} == {"unsupported"}


def test_the_output_holds_no_error_and_no_local_path(executed):
    notebook, measured = executed
    assert not [o for c in notebook.cells for o in c.get("outputs", ()) if o.output_type == "error"]
    assert not [
        o for c in notebook.cells for o in c.get("outputs", ()) if o.get("name") == "stderr"
    ]
    assert LOCAL_PATH.search(f"in {ROOT}/data") and not LOCAL_PATH.search(
        "$A2LIB_DATA/a/b, 1/2 TFLOP/s"
    )
    for text in texts(notebook):
        assert not LOCAL_PATH.search(text) and str(measured) not in text and str(ROOT) not in text

"""notebooks/flash.ipynb through papermill, as a reader runs it, at the smallest size."""

import csv
import json
import os
import re
import shutil

import nbformat
import pytest
from notebook_runs import PAPERMILL, run
from notebook_texts import figures, rows, texts

from a2lib.lab import device_lock
from a2lib.lab.store import data_folder
from a2lib.paths import ROOT
from a2lib.theory.attention import PASSES

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FLASH = ROOT / "notebooks" / "flash.ipynb"
# A parameter: its name, its type, its default and what it is.
PARAMETER = re.compile(r"(\w+): (int|float|str|bool) = (.+?)  # (.+)")
LOCAL_PATH = re.compile(r"(?<![\w.~/$<-])/\w[\w.-]*/")


def tagged(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_notebook_declares_its_parameters(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    (cell,) = tagged(notebook, "parameters")
    assert tagged(notebook, "measure")
    for line in cell.source.splitlines():
        assert PARAMETER.fullmatch(line), line
    assert notebook.metadata.kernelspec.name == "python3"
    assert "papermill" not in notebook.metadata and not tagged(notebook, "injected-parameters")
    for found in notebook.cells:
        for output in found.get("outputs", ()):
            assert output.output_type != "error"
    assert not LOCAL_PATH.search("\n".join(texts(notebook)))


def test_a_notebook_names_chapters_as_the_sidebar_does():
    topics = set(re.findall(r"^ +title: \"?(.+?)\"?$", (ROOT / "_toc.yml").read_text(), re.M))
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        text = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
        named = re.findall(r'[Cc]hapters?\s+"([^"]+)"', text)
        assert named and set(named) <= topics, path.name


def test_help_notebook_documents_every_parameter():
    done = run(ROOT, [PAPERMILL, "--help-notebook", str(FLASH)])
    (cell,) = tagged(nbformat.read(FLASH, as_version=4), "parameters")
    for line in cell.source.splitlines():
        name, kind, _, comment = PARAMETER.fullmatch(line).groups()
        assert f"{name}: {kind} (default" in done.stdout and comment in done.stdout


def test_a_busy_device_is_one_line_and_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_LOCKS", str(tmp_path))
    output, data = tmp_path / "out.ipynb", tmp_path / "data"
    env = {"A2LIB_DATA": str(data), "CUDA_VISIBLE_DEVICES": ""}
    with device_lock("cpu", "run a"):
        done = run(ROOT, [PAPERMILL, str(FLASH), str(output)], ends=1, env=env)
    assert "Traceback" not in done.stderr and not data.exists()
    cells = nbformat.read(output, as_version=4).cells
    (error,) = [o for c in cells for o in c.get("outputs", ()) if o.output_type == "error"]
    (line,) = error.traceback
    assert done.stderr.strip().splitlines()[-1] == line
    assert f"DeviceBusy: this CPU is measured by process {os.getpid()}, run a, since " in line


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook run from its own folder, as JupyterLab does, where it measured, and what the
    terminal showed: a line like the README's, with no output path, in a copy of the repository,
    which spares the reader's own runs."""
    copy = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns("*.pyc.*", "*.egg-info")  # another process may be writing one
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    (copy / "notebooks").mkdir()
    shutil.copy(FLASH, copy / "notebooks")
    asked = ["-p", "sweep", "leaderboard", "-p", "heads", "1.0"]
    asked += ["-p", "implementations", "eager,sdpa_cudnn"]
    env = {"A2LIB_GIT": "0" * 12, "CUDA_VISIBLE_DEVICES": ""}
    done = run(copy, [PAPERMILL, FLASH.name, *asked], cwd=copy / "notebooks", env=env)
    notebook = nbformat.read(copy / "build" / "runs" / "flash.ipynb", as_version=4)
    return notebook, copy / "build" / "data" / "measured", done.stderr


@pytest.mark.slow
def test_the_terminal_says_where_the_notebook_and_the_rows_are(executed, monkeypatch):
    notebook, measured, said = executed
    assert said.endswith("the executed notebook is in ../build/runs/flash.ipynb\n")
    assert "heads = 1" in tagged(notebook, "injected-parameters")[0].source
    assert not (measured.parents[2] / "data").exists()  # a CPU's rows are not for commits
    monkeypatch.delenv("A2LIB_DATA", raising=False)
    assert data_folder("cuda") == ROOT / "data"


@pytest.mark.slow
def test_rows_are_stored_under_their_run(executed):
    _, measured, _ = executed
    found = rows(measured, "flash")
    assert {(row["implementation"], row["pass"]): row["status"] for row in found} == {
        (name, p): "unsupported" if name == "sdpa_cudnn" else "ok"
        for name in ("eager", "sdpa_cudnn")
        for p in PASSES
    }
    assert rows(measured, "ceiling", status="ok")
    with open(measured / "runs.csv", newline="") as file:
        runs = list(csv.DictReader(file))
    command = "papermill notebooks/flash.ipynb -p implementations eager,sdpa_cudnn"
    assert {run["command"] for run in runs} == {f"{command} -p sweep leaderboard"}
    assert {json.loads(run["parameters"])["sweep"] for run in runs} == {"leaderboard"}


@pytest.mark.slow
def test_a_bar_is_one_line_a_table_has_a_figure_and_no_output_names_this_machine(executed):
    notebook, measured, _ = executed
    shown = list(texts(notebook))
    bars = [text for text in shown if re.search(r" \d+/\d+ rows ", text)]
    assert len(bars) == 6  # ceilings, times, protocols, first calls, errors, counters
    assert all("100%" in bar and "\r" not in bar and "\n" not in bar for bar in bars)
    assert figures(notebook) == 4  # ceilings, times, protocols, errors
    outputs = [o for c in notebook.cells for o in c.get("outputs", ())]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert LOCAL_PATH.search(f"in {ROOT}/data")
    assert not LOCAL_PATH.search("$A2LIB_DATA/a/b, 1/2 TFLOP/s")
    for text in shown:
        assert not LOCAL_PATH.search(text) and str(measured.parents[2]) not in text


@pytest.mark.slow
def test_a_sweep_has_the_protocols_and_the_errors(executed):
    _, measured, _ = executed
    errors = rows(measured, "flash_accuracy")
    assert len(errors) == 2 * 2 * 2 * 2 * 4
    expected = {("eager", "ok"), ("sdpa_cudnn", "unsupported")}
    assert {(row["implementation"], row["status"]) for row in errors} == expected
    found = {(r["protocol"], r["second"]): r["status"] for r in rows(measured, "flash_protocol")}
    assert found.pop(("board", "0")) == "unsupported" and set(found.values()) == {"ok"}
    assert {*found} >= {("burst", "0"), ("sustained", "0"), ("fixed_order", "0"), ("first", "2")}
    assert rows(measured, "flash_counters", status="unsupported")

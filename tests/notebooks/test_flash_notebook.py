"""notebooks/flash.ipynb through papermill, as a reader runs it, at the smallest size."""

import csv
import json
import re
import shutil

import nbformat
import pytest
from notebook_runs import PAPERMILL, run

from a2lib.lab.store import data_folder
from a2lib.paths import ROOT
from a2lib.theory.attention import PASSES

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FLASH = ROOT / "notebooks" / "flash.ipynb"
# Of the tables that a CPU does not fill, those that are quickly drawn; the others show nothing.
SHOWN_AS_PUBLISHED = ("flash_accuracy", "flash_protocol")
# A parameter: its name, its type, its default and what it is.
PARAMETER = re.compile(r"(\w+): (int|float|str|bool) = (.+?)  # (.+)")
LOCAL_PATH = re.compile(r"(?<![\w.~/$<-])/\w[\w.-]*/")


def texts(notebook):
    """Each output as text: what was printed, or shown beside an image or as a table."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield output.get("text", "") + output.get("data", {}).get("text/plain", "")


def figures(notebook):
    """How many of its outputs are figures."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def rows(measured, section, **cells):
    """The rows of a section, all of the notebook's runs and with these cells."""
    with open(measured / "runs.csv", newline="") as file:
        runs = {run["run"] for run in csv.DictReader(file)}
    with open(measured / section / "cpu.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert {row["run"] for row in found} <= runs
    for name, cell in cells.items():
        assert {row[name] for row in found} == {str(cell)}, name
    return found


def tagged(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_notebook_says_what_to_install_and_declares_its_parameters(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    (cell,) = tagged(notebook, "parameters")
    assert tagged(notebook, "measure")
    first = notebook.cells[0]  # what a notebook that is opened elsewhere needs
    assert first.cell_type == "markdown" and "`pip install -e '.[book]'` in a clone" in first.source
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


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The notebook run from its own folder, as JupyterLab does, where it measured, and what the
    terminal showed: a line like the README's, with no output path, in a copy of the repository,
    which spares the reader's own runs."""
    copy = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns("*.pyc.*", "*.egg-info")  # another process may be writing one
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    for table in SHOWN_AS_PUBLISHED:
        shutil.copytree(ROOT / "data" / "measured" / table, copy / "data" / "measured" / table)
    shutil.copy(ROOT / "data" / "measured" / "runs.csv", copy / "data" / "measured")
    (copy / "notebooks").mkdir()
    shutil.copy(FLASH, copy / "notebooks")
    asked = ["-p", "seq_len", "16", "-p", "heads", "1.0"]
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
    assert not [*(measured.parents[2] / "data").rglob("cpu.csv")]  # which are not for commits
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
    command = "papermill notebooks/flash.ipynb -p seq_len 16 -p implementations eager,sdpa_cudnn"
    assert {run["command"] for run in runs} == {command}
    assert {json.loads(run["parameters"])["sweep"] for run in runs} == {"shape"}


@pytest.mark.slow
def test_a_bar_is_one_line_a_table_has_a_figure_and_no_output_names_this_machine(executed):
    notebook, measured, _ = executed
    shown = list(texts(notebook))
    bars = [text for text in shown if re.search(r" \d+/\d+ rows ", text)]
    assert len(bars) == 2  # ceilings, times
    assert all("100%" in bar and "\r" not in bar and "\n" not in bar for bar in bars)
    assert figures(notebook) == 2 + len(SHOWN_AS_PUBLISHED)  # ceilings and times, measured here
    outputs = [o for c in notebook.cells for o in c.get("outputs", ())]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert LOCAL_PATH.search(f"in {ROOT}/data")
    assert not LOCAL_PATH.search("$A2LIB_DATA/a/b, 1/2 TFLOP/s")
    for text in shown:
        assert not LOCAL_PATH.search(text) and str(measured.parents[2]) not in text

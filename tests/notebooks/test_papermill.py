"""Notebooks as they are committed, and one through papermill, as a reader runs it."""

import csv
import json
import re
import shutil

import nbformat
import pytest
from notebook_runs import PAPERMILL, run
from tables import values

from a2lib.lab.store import data_folder
from a2lib.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Has one sweep, and less to load than most.
SHORT = ROOT / "notebooks" / "checkpointing.ipynb"
STRATEGIES = ("none", "block")
# A parameter: its name, its type, its default and what it is.
PARAMETER = re.compile(r"(\w+): (int|float|str|bool) = (.+?)  # (.+)")
LOCAL_PATH = re.compile(r"(?<![\w.~/$<-])/\w[\w.-]*/")


def outputs(notebook):
    for cell in notebook.cells:
        yield from cell.get("outputs", ())


def texts(notebook):
    """Each output as text: what was printed, or shown beside an image or as a table."""
    for output in outputs(notebook):
        yield output.get("text", "") + output.get("data", {}).get("text/plain", "")


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


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
    assert "error" not in values(outputs(notebook), "output_type")
    assert not LOCAL_PATH.search("\n".join(texts(notebook)))


def test_a_notebook_names_chapters_as_the_sidebar_does():
    topics = set(re.findall(r"^ +title: \"?(.+?)\"?$", (ROOT / "_toc.yml").read_text(), re.M))
    for path in NOTEBOOKS:
        named = []
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                named += re.findall(r'[Cc]hapters?\s+"([^"]+)"', cell.source)
        assert named and set(named) <= topics, path.name


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Return the notebook run from its own folder, as JupyterLab does, where it measured, and what
    the terminal showed: a line like the README's, with no output path, in a copy of the repository,
    which spares the reader's own runs."""
    copy = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns("*.pyc.*", "*.egg-info")  # another process may be writing one
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    (copy / "notebooks").mkdir()
    shutil.copy(SHORT, copy / "notebooks")
    asked = ["-p", "context", "8", "-p", "steps", "1.0", "-p", "strategies", ",".join(STRATEGIES)]
    env = {"A2LIB_GIT": "0" * 12, "CUDA_VISIBLE_DEVICES": ""}
    done = run(copy, [PAPERMILL, SHORT.name, *asked], cwd=copy / "notebooks", env=env)
    notebook = nbformat.read(copy / "build" / "runs" / SHORT.name, as_version=4)
    return notebook, copy / "build" / "data" / "measured", done.stderr


@pytest.mark.slow
def test_the_terminal_says_where_the_notebook_and_the_rows_are(executed, monkeypatch):
    notebook, measured, said = executed
    assert said.endswith("the executed notebook is in ../build/runs/checkpointing.ipynb\n")
    assert "steps = 1" in tagged(notebook, "injected-parameters")[0].source
    assert not (measured.parents[2] / "data").exists()  # which is for commits
    monkeypatch.delenv("A2LIB_DATA", raising=False)
    assert data_folder("cuda") == ROOT / "data"


@pytest.mark.slow
def test_rows_are_stored_under_their_run(executed):
    _, measured, _ = executed
    found = table(measured / "checkpointing" / "cpu.csv")
    [recorded] = table(measured / "runs.csv")
    ok = ("ok", recorded["run"])
    assert values(found, "strategy", "status", "run") == [("none", *ok), ("block", *ok)]
    asked = "-p context 8 -p strategies none,block -p steps 1.0"
    assert recorded["command"] == f"papermill notebooks/checkpointing.ipynb {asked}"
    assert json.loads(recorded["parameters"])["strategies"] == "none,block"


@pytest.mark.slow
def test_a_bar_is_one_line_a_table_has_a_figure_and_no_output_names_this_machine(executed):
    notebook, measured, _ = executed
    bars = figures = 0
    for output in outputs(notebook):
        assert output.output_type != "error" and output.get("name") != "stderr"
        figures += "image/png" in output.get("data", {})
    for text in texts(notebook):
        assert not LOCAL_PATH.search(text) and str(measured.parents[2]) not in text
        if re.search(r" \d+/\d+ rows,", text):
            bars += 1
            assert "\r" not in text and "\n" not in text
    assert bars == 1 and figures
    assert LOCAL_PATH.search(f"in {ROOT}/data")
    assert not LOCAL_PATH.search("$A2LIB_DATA/a/b, 1/2 TFLOP/s")

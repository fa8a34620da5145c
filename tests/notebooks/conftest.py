"""A notebook through papermill, at the size that a test asks for."""

import nbformat
import papermill
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_core.utils import run_sync
from notebook_runs import environment

from a2lib.paths import ROOT

# Ahead of a notebook's own cells: the worker of the one before measures for it too.
BEFORE = """
%reset -f
%env A2LIB_DATA={}
from dataclasses import replace
from a2lib.experiments.harness import experiment as harness
harness.own = getattr(harness, "own", harness._measure)
harness.kept = getattr(harness, "kept", None)
def measure(given, table, tasks, harness=harness, replace=replace):
    given.worker = harness.kept
    harness.own(given, replace(table, keep_worker=True), tasks)
    harness.kept = given.worker
harness._measure = measure
"""


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """``execute(name, seq_len=32, ...)``: the executed notebook, its rows' folder.

    Those of a file share a kernel and its worker, which take longer to start than all that is
    measured; test_flash_notebook.py has a run by the command.
    """
    kernel = AsyncKernelManager(kernel_name="python3")
    env = {"A2LIB_LOCKS": str(tmp_path_factory.mktemp("locks")), "CUDA_VISIBLE_DEVICES": ""}
    run_sync(kernel.start_kernel)(env=environment(ROOT, **env), cwd=ROOT)

    def executed(name, **given):
        folder = tmp_path_factory.mktemp(name)
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(BEFORE.format(folder / "data")))
        nbformat.write(notebook, folder / "in.ipynb")
        paths = folder / "in.ipynb", folder / "out.ipynb"
        done = papermill.execute_notebook(*paths, given, km=kernel, progress_bar=False)
        return done, folder / "data" / "measured"

    yield executed
    run_sync(kernel.shutdown_kernel)(now=True)

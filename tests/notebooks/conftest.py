"""A notebook through papermill, at the size that a test asks for."""

import nbformat
import papermill
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_core.utils import run_sync
from notebook_runs import environment

from a2lib.paths import ROOT

# Ahead of a notebook's own cells: what it measures with stays for the next one.
BEFORE = """
%reset -f
import os
os.environ["A2LIB_DATA"] = {!r}
from a2lib.experiments.harness import run
def measure(given, *args, kept=run, measure=run.measure, **how):
    given.worker = given.worker or kept.worker
    try:
        measure(given, *args, **how | {{"keep_worker": True}})
    finally:
        kept.worker = given.worker
if not hasattr(run, "worker"):
    run.worker, run.measure = None, measure
"""


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """``execute(name, seq_len=32, ...)``: the executed notebook, its rows' folder.

    All of a file in one kernel and, until one fails, one worker: at these sizes they take longer to
    start than to do all that is asked.
    """
    kernel = AsyncKernelManager(kernel_name="python3")
    env = {"A2LIB_LOCKS": str(tmp_path_factory.mktemp("locks")), "CUDA_VISIBLE_DEVICES": ""}
    run_sync(kernel.start_kernel)(env=environment(ROOT, **env), cwd=ROOT)

    def executed(name, **given):
        folder = tmp_path_factory.mktemp(name)
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        before = BEFORE.format(str(folder / "data"))
        notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
        nbformat.write(notebook, folder / "in.ipynb")
        how = {"parameters": given, "km": kernel, "progress_bar": False}
        done = papermill.execute_notebook(folder / "in.ipynb", folder / "out.ipynb", **how)
        return done, folder / "data" / "measured"

    yield executed
    run_sync(kernel.shutdown_kernel)(now=True)

"""A notebook through papermill, at the size that a test asks for."""

import pytest

from a2lib.paths import ROOT

# The worker of the notebook before measures for this one too, and every table keeps it.
TAKEN = """
from a2lib.experiments.{} import EXPERIMENT
run.worker = globals().get("worker")
for table in EXPERIMENT.tables:
    object.__setattr__(table, "keep_worker", True)
"""
LEFT = "worker = run.worker"


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """``execute(name, seq_len=32, ...)``: the executed notebook, its rows' folder.

    Those of a file share a kernel and its worker, which take longer to start than all that is
    measured; test_flash_notebook.py has a run by the command.
    """
    # Here, since the tests beside this that are for a GPU run where these are not installed.
    import nbformat
    import papermill
    from jupyter_client import AsyncKernelManager
    from jupyter_core.utils import run_sync
    from notebook_runs import environment

    kernel = AsyncKernelManager(kernel_name="python3")
    env = {"A2LIB_LOCKS": str(tmp_path_factory.mktemp("locks")), "CUDA_VISIBLE_DEVICES": ""}
    run_sync(kernel.start_kernel)(env=environment(ROOT, **env), cwd=ROOT)

    def executed(name, **given):
        folder = tmp_path_factory.mktemp(name)
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        starts = next(i for i, cell in enumerate(notebook.cells) if ".start(" in cell.source)
        before, steps = notebook.cells[: starts + 1], notebook.cells[starts + 1 :]
        cell = nbformat.v4.new_code_cell
        first = cell(f"%env A2LIB_DATA={folder / 'data'}")
        notebook.cells = [first, *before, cell(TAKEN.format(name)), *steps, cell(LEFT)]
        nbformat.write(notebook, folder / "in.ipynb")
        paths = folder / "in.ipynb", folder / "out.ipynb"
        done = papermill.execute_notebook(*paths, given, km=kernel, progress_bar=False)
        return done, folder / "data" / "measured"

    yield executed
    run_sync(kernel.shutdown_kernel)(now=True)

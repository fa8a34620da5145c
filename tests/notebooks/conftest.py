"""A notebook through papermill, at the size that a test asks for."""

# Makes the list of fonts where there is none: a notebook that has to says so among its errors.
import matplotlib.font_manager  # noqa: F401
import nbformat
import pytest
from notebook_runs import PAPERMILL, run

from a2lib.paths import ROOT


@pytest.fixture(scope="session")
def execute(tmp_path_factory):
    """``execute(name, "-p", "seq_len", "32", ...)``: the executed notebook, its rows' folder."""

    def executed(name, *asked):
        folder = tmp_path_factory.mktemp(name)
        command = [PAPERMILL, f"notebooks/{name}.ipynb", str(folder / "out.ipynb")]
        env = {"A2LIB_DATA": str(folder / "data"), "A2LIB_LOCKS": str(folder)}
        done = run(ROOT, [*command, *map(str, asked)], env=env | {"CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode == 0, done.stderr
        return nbformat.read(folder / "out.ipynb", as_version=4), folder / "data" / "measured"

    return executed

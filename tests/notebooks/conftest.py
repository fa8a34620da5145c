"""A notebook through papermill, at the size that a test asks for."""

import os
import subprocess
import sys

# Makes the list of fonts where there is none: a notebook that has to says so among its errors.
import matplotlib.font_manager  # noqa: F401
import nbformat
import pytest

from a2lib.paths import ROOT


@pytest.fixture(scope="session")
def execute(tmp_path_factory):
    """``execute(name, "-p", "seq_len", "32", ...)``: the executed notebook, its rows' folder."""

    def run(name, *asked, cwd=ROOT, **environment):
        folder = tmp_path_factory.mktemp(name)
        inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        own = {"A2LIB_DATA": str(folder / "data"), "A2LIB_LOCKS": str(folder)}
        done = subprocess.run(
            [sys.executable, "-m", "papermill", str(ROOT / "notebooks" / f"{name}.ipynb")]
            + [str(folder / "out.ipynb"), *map(str, asked)],
            cwd=cwd,
            env=inherited | own | {"CUDA_VISIBLE_DEVICES": ""} | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        return nbformat.read(folder / "out.ipynb", as_version=4), folder / "data" / "measured"

    return run

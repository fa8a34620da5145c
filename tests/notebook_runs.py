"""Throw-away notebooks, and what runs of them show."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

from a2lib.paths import ROOT

PAPERMILL = str(Path(sys.executable).with_name("papermill"))


def write_notebook(path, *sources):
    """A notebook of these cells, the first of which has the parameters; its folder is made."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


def copy_package(root):
    """As much of a2lib as papermill's entry point loads: ``root``'s notebooks are then "ours"."""
    (root / "src" / "a2lib").mkdir(parents=True)
    for name in ("__init__.py", "errors.py", "paths.py", "papermill_default.py"):
        shutil.copy(ROOT / "src" / "a2lib" / name, root / "src" / "a2lib")


def environment(root, **changes):
    """That of a reader whose repository is ``root``."""
    found = {**os.environ, "PYTHONPATH": str(root / "src"), **changes}
    for name in ("TRITON_INTERPRET", "A2LIB_DATA", "PYTHONWARNINGS"):
        if name not in changes:
            found.pop(name, None)
    return found


def run(root, command, *, ends=0, cwd=None, env=None, **streams):
    """Run a command, which ends with this exit code, with both outputs captured; `streams` says
    what standard input is."""
    streams = {"capture_output": True, "text": True, **(streams or {"stdin": subprocess.DEVNULL})}
    env = environment(root, **(env or {}))
    done = subprocess.run(command, cwd=cwd or root, env=env, timeout=600, **streams)
    assert done.returncode == ends, done.stderr
    return done


def shown_on(leader):
    """All that was shown on a terminal until its last process has gone."""
    shown = b""
    with contextlib.suppress(OSError):  # Linux says so then
        while True:
            piece = os.read(leader, 65536)
            if not piece:
                break
            shown += piece
    os.close(leader)
    return shown.decode(errors="replace")

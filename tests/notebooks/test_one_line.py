"""What papermill shows where the notebook of a chapter refuses to go on: one line, no traceback."""

import json
import os
import subprocess

import pytest
from notebook_runs import PAPERMILL

from a2lib.measure import DeviceLock
from a2lib.paths import ROOT


@pytest.fixture
def papermill(tmp_path, monkeypatch):
    """``papermill(*parameters)`` runs the flash notebook: the error's line, and the cell's."""
    monkeypatch.setenv("A2LIB_LOCKS", str(tmp_path))

    def run(*parameters):
        output = tmp_path / "out.ipynb"
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        env |= {"PYTHONPATH": str(ROOT / "src"), "A2LIB_DATA": str(tmp_path / "data")}
        command = [PAPERMILL, str(ROOT / "notebooks" / "flash.ipynb"), str(output), *parameters]
        done = subprocess.run(
            command, env={**env, "CUDA_VISIBLE_DEVICES": ""}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 1 and "Traceback" not in done.stderr
        cells = json.loads(output.read_text())["cells"]
        (error,) = [o for c in cells for o in c.get("outputs", ()) if o["output_type"] == "error"]
        (line,) = error["traceback"]
        assert done.stderr.strip().splitlines()[-1] == line
        return line

    return run


def test_a_number_beyond_all_measure_stops_before_anything_runs(papermill, tmp_path):
    line = papermill("-p", "time_limit_s", "1" * 400)
    assert line.startswith("ParameterError: time_limit_s = 1111") and len(line) < 200
    assert not (tmp_path / "data").exists()


def test_a_busy_device(papermill):
    lock = DeviceLock("cpu")
    with lock.held("run a"):
        line = papermill("-p", "seq_len", "16")
    assert f"DeviceBusy: this CPU is measured by process {os.getpid()}, run a, since " in line

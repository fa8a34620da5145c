"""What papermill shows where the notebook of a chapter refuses to go on: one line, no traceback."""

import json
import os

from notebook_runs import PAPERMILL, run

from a2lib.measure import DeviceLock
from a2lib.paths import ROOT


def test_a_busy_device(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_LOCKS", str(tmp_path))
    output, data = tmp_path / "out.ipynb", tmp_path / "data"
    env = {"A2LIB_DATA": str(data), "CUDA_VISIBLE_DEVICES": ""}
    with DeviceLock("cpu").held("run a"):
        done = run(ROOT, [PAPERMILL, "notebooks/flash.ipynb", str(output)], env=env)
    assert done.returncode == 1 and "Traceback" not in done.stderr and not data.exists()
    cells = json.loads(output.read_text())["cells"]
    (error,) = [o for c in cells for o in c.get("outputs", ()) if o["output_type"] == "error"]
    (line,) = error["traceback"]
    assert done.stderr.strip().splitlines()[-1] == line
    assert f"DeviceBusy: this CPU is measured by process {os.getpid()}, run a, since " in line

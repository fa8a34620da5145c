"""What papermill shows where the notebook of a chapter refuses to go on: one line, no traceback."""

import json
import os
import subprocess

from notebook_runs import PAPERMILL

from a2lib.measure import DeviceLock
from a2lib.paths import ROOT


def test_a_busy_device(tmp_path, monkeypatch):
    monkeypatch.setenv("A2LIB_LOCKS", str(tmp_path))
    output, data = tmp_path / "out.ipynb", tmp_path / "data"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT / "src"), "A2LIB_DATA": str(data), "CUDA_VISIBLE_DEVICES": ""}
    command = [PAPERMILL, str(ROOT / "notebooks" / "flash.ipynb"), str(output), "-p", "seq_len"]
    with DeviceLock("cpu").held("run a"):
        done = subprocess.run(
            [*command, "16"], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr and not data.exists()
    cells = json.loads(output.read_text())["cells"]
    (error,) = [o for c in cells for o in c.get("outputs", ()) if o["output_type"] == "error"]
    (line,) = error["traceback"]
    assert done.stderr.strip().splitlines()[-1] == line
    assert f"DeviceBusy: this CPU is measured by process {os.getpid()}, run a, since " in line

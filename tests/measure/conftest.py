"""What the tests of the result store share: a data folder with one run, rows, other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from a2lib.measure import FLASH, Store
from a2lib.measure.runs import COLUMNS

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
RUN = "20260102T030405Z-cpu-000000"


@pytest.fixture
def data(tmp_path) -> Path:
    """A data folder that knows the run of make_row."""
    path = tmp_path / "data" / "measured" / "runs.csv"
    path.parent.mkdir(parents=True)
    row = dict.fromkeys(COLUMNS, "") | {
        "run": RUN, "started": "2026-01-02T03:04:05Z", "device": "cpu", "n_devices": "1",
        "parameters": "{}",
    }  # fmt: skip
    path.write_text(f"{','.join(COLUMNS)}\n{','.join(row.values())}\n")
    return tmp_path / "data"


@pytest.fixture
def store(data) -> Store:
    return Store(FLASH, "cpu", data)


@pytest.fixture
def make_row():
    """A valid row of the flash section; columns given by name replace its own."""

    def make(**columns) -> dict:
        return {
            "implementation": "a2lib", "dtype": "bf16", "batch": 1, "heads": 16, "seq_len": 128,
            "head_dim": 64, "causal": True, "pass": "forward", "status": "ok", "ms": 1.5,
            "ms_p20": 1.25, "ms_p80": 1.75, "n": 10, "run": RUN,
        } | columns  # fmt: skip

    return make


@pytest.fixture
def python():
    """Start another Python on ``code`` and ``arguments``; ``prefix`` is a command to start it with.

    Its torch is blocked, which also makes it start at once.
    """
    started = []

    def start(code: str, *arguments, prefix=(), **options) -> subprocess.Popen:
        environment = dict(os.environ, PYTHONPATH=SOURCE)
        environment.pop("TRITON_INTERPRET", None)
        code = f"import sys; sys.modules['torch'] = None\n{code}"
        command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
        child = subprocess.Popen(
            command, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        )  # fmt: skip
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()

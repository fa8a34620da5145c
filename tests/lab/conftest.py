"""What the tests of the result store share: a data folder with one run, rows, other processes."""

from pathlib import Path

import pytest

from a2lib.lab import Table
from a2lib.lab.runs import COLUMNS

RUN = "20260102T030405Z-cpu-000000"


@pytest.fixture
def data(tmp_path) -> Path:
    """Return a data folder that knows the run of make_row."""
    path = tmp_path / "data" / "measured" / "runs.csv"
    path.parent.mkdir(parents=True)
    known = {"run": RUN, "started": "2026-01-02T03:04:05Z", "device": "cpu", "n_devices": "1"}
    row = dict.fromkeys(COLUMNS, "") | known | {"parameters": "{}"}
    path.write_text(f"{','.join(COLUMNS)}\n{','.join(row.values())}\n")
    return tmp_path / "data"


@pytest.fixture
def store(data) -> Table:
    return Table("flash", "cpu", data)


@pytest.fixture
def make_row():
    """Return a valid row of the flash section; columns given by name replace its own."""
    key = {"implementation": "a2lib", "dtype": "bf16", "batch": 1, "heads": 16, "seq_len": 128}
    key |= {"head_dim": 64, "causal": True, "pass": "forward"}
    result = {"status": "ok", "ms": 1.5, "ms_p20": 1.25, "ms_p80": 1.75, "n": 10, "run": RUN}
    return lambda **columns: key | result | columns


@pytest.fixture
def python(python):
    """Storing and reading need neither these nor their time to start."""
    block = "import sys; sys.modules |= dict.fromkeys(('torch', 'triton', 'pandas', 'numpy'))"
    return lambda code, *arguments: python(f"{block}\n{code}", *arguments)

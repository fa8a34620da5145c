"""Functions that ranks run are in the modules beside this file; the ranks find them by path."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def rank_env():
    """The environment in which ranks find the modules of this folder."""
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


def pytest_terminal_summary(terminalreporter):
    """Each failed check in ranks, in short, behind everything else: a log may be cut off."""
    for report in terminalreporter.getreports("failed"):
        for key, text in report.user_properties:
            if key == "short":
                name = report.nodeid.rpartition("::")[2]
                terminalreporter.write_line(f"{name}: {text}")

"""Functions that ranks run are in the modules beside this file; the ranks find them by path."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def rank_env():
    """The environment in which ranks find the modules of this folder."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}

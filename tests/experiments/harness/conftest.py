"""A data folder of its own for each test, and workers that find the toy section."""

import os
from pathlib import Path

import pytest
from experiments.harness import toy

from a2lib.lab import Store, start_run


@pytest.fixture(autouse=True)
def toy_is_found(monkeypatch):
    """The toy's handler has a name that a worker can import."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]), prepend=os.pathsep)


@pytest.fixture
def store(tmp_path):
    return Store(toy.TOY, "cpu", data=tmp_path / "data")


@pytest.fixture
def run(store):
    return start_run(command="test", parameters={}, device="cpu", data=store.data)

"""A data folder of its own for each test."""

import pytest

from a2lib.measure import FLASH, Store, start_run


@pytest.fixture
def store(tmp_path):
    return Store(FLASH, "cpu", data=tmp_path / "data")


@pytest.fixture
def run(store):
    return start_run(command="test", parameters={}, device="cpu", data=store.data)

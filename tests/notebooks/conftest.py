import pytest


@pytest.fixture(autouse=True)
def rows_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("A2LIB_DATA", str(tmp_path / "data"))


@pytest.fixture
def replace(monkeypatch):
    """``replace(cells, name=value)``: other values for globals of the notebook."""

    def swap(cells, **values):
        for name, value in values.items():
            monkeypatch.setitem(cells.namespace, name, value)

    return swap

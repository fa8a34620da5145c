"""The parameter cell of each notebook is what its experiment declares."""

import importlib

import nbformat
import pytest

from a2lib.experiments.harness.parameters import cell_source
from a2lib.measure.sections import notebooks
from a2lib.paths import ROOT


@pytest.mark.parametrize("name", notebooks())
def test_the_cell_is_the_dataclass(name):
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    (cell,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", ())]
    experiment = importlib.import_module(f"a2lib.experiments.{name}")
    assert cell.source == cell_source(experiment.Parameters)

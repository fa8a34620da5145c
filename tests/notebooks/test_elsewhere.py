"""A notebook that is opened elsewhere says what it needs."""

import nbformat
import pytest

from a2lib.paths import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_the_first_cell_says_what_to_install(path):
    first = nbformat.read(path, 4).cells[0]
    assert first.cell_type == "markdown" and "`pip install -e '.[book]'` in a clone" in first.source

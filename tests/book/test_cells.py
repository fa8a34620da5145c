"""A page's cells run where the book is built: what they show, and that what they raise is heard."""

import os

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from a2lib.paths import ROOT


@pytest.fixture
def page(monkeypatch, tmp_path):
    """``page(cell, ...)``: MyST-NB's client of a page of these cells."""
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    import a2lib_cells
    from myst_nb.core import execute
    from myst_nb.core.config import NbParserConfig

    monkeypatch.setattr(execute, "NotebookClientInline", execute.NotebookClientInline)
    a2lib_cells.setup(None)
    file = tmp_path / "page.md"
    file.touch()

    def make(*cells):
        notebook, config = new_notebook(cells=[*map(new_code_cell, cells)]), NbParserConfig
        client = execute.create_client(notebook, file, config(execution_mode="inline"), None)
        client.start_client()
        return client

    return make


SHOWS = """
class Shows:
    def __init__(self, text): self.text = text
    def _repr_markdown_(self): return self.text
import os
Shows(' '.join(os.listdir()))"""


def test_a_cell_shows_its_last_line_and_an_expression_knows_its_names(page):
    here, client = os.getcwd(), page(SHOWS, "x = 2", "None")
    outputs = [client.code_cell_outputs(i)[1] for i in range(3)]
    shown = [[output.data for output in found] for found in outputs]
    assert shown == [[{"text/markdown": "page.md"}], [], []]
    assert client.eval_variable("x + 1")[0].data == {"text/plain": "3"}
    assert client.eval_variable("Shows('')") == []
    assert os.getcwd() == here
    with pytest.raises(NameError):
        page("1").eval_variable("x")


def test_what_a_cell_raises_is_raised(page):
    with pytest.raises(AssertionError, match="no"):
        page("assert False, 'no'").code_cell_outputs(0)

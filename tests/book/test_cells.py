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

    def make(*cells, **metadata):
        notebook = new_notebook(cells=[new_code_cell(cell, metadata=metadata) for cell in cells])
        config = NbParserConfig
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
    [output] = client.code_cell_outputs(0)[1]
    assert output.data == {"text/markdown": "page.md"}
    assert client.code_cell_outputs(1)[1] == client.code_cell_outputs(2)[1] == []
    assert client.eval_variable("x + 1")[0].data == {"text/plain": "3"}
    assert client.eval_variable("Shows('')") == []
    assert os.getcwd() == here
    with pytest.raises(NameError):
        page("1").eval_variable("x")


def test_what_a_cell_raises_is_raised(page):
    with pytest.raises(AssertionError, match="no"):
        page("assert False, 'no'").code_cell_outputs(0)


@pytest.mark.parametrize("last", ["figure", "axes"])
def test_a_figure_of_matplotlib_is_a_chart(page, last):
    drawn = "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\n"
    [output] = page(drawn + last, mystnb={"figure": {}}).code_cell_outputs(0)[1]
    assert "<svg" in output.data["image/svg+xml"] and len(output.data) == 1


def test_a_cell_of_a_figure_without_an_image_ends_the_build(page):
    client = page("None", mystnb={"figure": {"name": "fig-mine"}})
    with pytest.raises(ValueError, match="page.md: the cell of the figure fig-mine shows no image"):
        client.code_cell_outputs(0)

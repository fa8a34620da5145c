"""The directive `measure`: which cells of a notebook it shows, and what it refuses."""

import io

import pytest
from bs4 import BeautifulSoup
from nbformat import write
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from a2lib.paths import ROOT

CELLS = [
    new_code_cell("CASES = 1", metadata={"tags": ["cases"]}),
    new_markdown_cell("def measure", metadata={"tags": ["measure"]}),
    new_code_cell("def measure(keys):\n    yield '```'", metadata={"tags": ["measure"]}),
    new_code_cell("print(measure)"),
    new_code_cell("N = 2\n\n\ndef measure_ladder(keys):\n    pass", metadata={"tags": ["measure"]}),
]
CASES, MEASURE, LADDER = CELLS[0].source, CELLS[2].source, CELLS[4].source


@pytest.fixture
def build(tmp_path, monkeypatch):
    """``build(directive)``: the HTML of a page of it, by the extensions that the book loads."""
    monkeypatch.syspath_prepend(ROOT / "book" / "_ext")
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    source, out = tmp_path / "book", tmp_path / "html"
    (source / "notebooks").mkdir(parents=True)
    write(new_notebook(cells=CELLS), source / "notebooks" / "flash.ipynb")
    (source / "notebooks" / "flash.md").write_text("# The record\n")  # in place of MyST-NB's page
    settings = {
        "extensions": ["myst_parser", "sphinx_design", "a2lib_measure"],
        "root_doc": "page",
        "exclude_patterns": ["*.ipynb"],
    }

    def make(directive):
        page = f"# A page\n\n{directive}\n\n```{{toctree}}\nnotebooks/flash\n```\n"
        (source / "page.md").write_text(page)
        with docutils_namespace():
            app = Sphinx(
                source, None, out, tmp_path / "trees", "html", settings,
                status=None, warning=io.StringIO(), freshenv=True, warningiserror=True,
            )  # fmt: skip
            app.build()
        html = BeautifulSoup((out / "page.html").read_text(), "html.parser")
        return app, html.find("details")

    return make


def code_blocks(fold):
    return [block.text.strip() for block in fold.select(".highlight-python pre")]


def test_a_fold_shows_the_tagged_cells_as_code_and_links_the_record(build):
    app, fold = build("```{measure} flash\n```")
    assert "How this was measured" in fold.summary.text and not fold.has_attr("open")
    assert code_blocks(fold) == [MEASURE, LADDER]
    assert fold.select_one("a[href='notebooks/flash.html']")
    assert fold.select(".highlight-python .k")  # a keyword is highlighted
    assert any("flash.ipynb" in file for file in app.env.dependencies["page"])


def test_options_choose_cells(build):
    for options, sources in (
        (":cells: cases measure", [CASES, MEASURE, LADDER]),
        (":functions: measure_ladder", [LADDER]),
        (":only: measure_ladder", [LADDER.removeprefix("N = 2\n\n\n")]),
    ):
        assert code_blocks(build(f"```{{measure}} flash\n{options}\n```")[1]) == sources

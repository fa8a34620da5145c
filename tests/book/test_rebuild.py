"""A second build: what it must notice by itself."""

import shutil

import pytest
from bs4 import BeautifulSoup

from a2lib.paths import ROOT

PAGE = """---
jupytext: {text_representation: {extension: .md, format_name: myst}}
kernelspec: {name: python3, display_name: Python 3}
---
# A page

```{code-cell} ipython3
:tags: [remove-input]

from a2lib.report import data
from a2lib.report.tables import Markdown

Markdown(f"There are {len(data.load('ceiling'))} rows.")
```
"""


@pytest.mark.slow
def test_new_data_make_a_new_page_though_its_text_is_the_same(small_book):
    """Sphinx does not know that a page reads data/, and is told."""
    page = small_book.root / "book" / "index.md"
    page.write_text(PAGE, encoding="utf-8")
    (small_book.root / "book" / "other.md").write_text("# Another\n\nIts words stay.\n")

    def words(file="index"):
        html = (small_book.html / f"{file}.html").read_text(encoding="utf-8")
        return BeautifulSoup(html, "html.parser").find("article").get_text()

    measured = small_book.root / "data" / "measured"
    shutil.rmtree(measured)
    small_book.build()  # what refers to other pages is a warning
    assert "There are 0 rows." in words()
    shutil.copytree(ROOT / "data" / "measured", measured)
    small_book.build()
    assert "There are 0 rows." not in words() and "rows." in words()
    # The search has the new words, and still those of a page that this build did not write.
    texts = (small_book.html / "_static" / "texts.js").read_text(encoding="utf-8")
    assert "There are 0 rows" not in texts and texts.count("Its words stay") == 1

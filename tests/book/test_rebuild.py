"""A second build: what it must notice by itself."""

import pytest
from bs4 import BeautifulSoup

pytestmark = pytest.mark.slow


def article(html, page):
    html = BeautifulSoup((html / page).read_text(encoding="utf-8"), "html.parser")
    return html.find("article").get_text()


def test_no_data_is_said_plainly_and_new_data_make_new_pages(book):
    text = article(book.without_rows, "flash.html")
    assert "not measured yet" in text and "Nothing of this sweep is measured yet" in text
    assert "nothing had been measured on another machine" in text
    before, after = (
        (html / "_static" / "texts.js").read_text() for html in (book.without_rows, book.html)
    )
    kept = '["questions", "Every question", "parallelism-on-paper"'
    assert "Nothing of this sweep" in before and kept in before

    # The second build was incremental: Sphinx does not know that a page reads data/, and noticed.
    assert "Nothing of this sweep is measured yet" not in article(book.html, "flash.html")
    # The search has the new words, and still those of a page that this build did not write.
    assert "Nothing of this sweep" not in after and after.count(kept) == 1

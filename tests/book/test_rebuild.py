"""A second build: what it must notice by itself."""

import pytest
from bs4 import BeautifulSoup

pytestmark = pytest.mark.slow


def article(book, page):
    html = BeautifulSoup((book.html / page).read_text(encoding="utf-8"), "html.parser")
    return html.find("article").get_text()


def test_no_data_is_said_plainly_and_new_data_make_new_pages(empty_book, rows):
    text = article(empty_book, "flash.html")
    assert "not measured yet" in text and "Nothing of this sweep is measured yet" in text
    assert "nothing had been measured on another machine" in text
    texts = empty_book.html / "_static" / "texts.js"
    kept = '["questions", "Every question", "parallelism-on-paper"'
    assert "Nothing of this sweep" in texts.read_text() and kept in texts.read_text()

    # An incremental build: Sphinx does not know that a page reads data/, and must notice.
    rows.write(empty_book.root / "data", keep=lambda shape: shape[1] == "bf16" and shape[5] == 64)
    done = empty_book.build()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing of this sweep is measured yet" not in article(empty_book, "flash.html")
    # The search has the new words, and still those of a page that this build did not write.
    assert "Nothing of this sweep" not in texts.read_text() and texts.read_text().count(kept) == 1

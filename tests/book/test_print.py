"""The book in one file, as `make pdf` prints it."""

import importlib.util

import pytest

from a2lib.paths import ROOT


@pytest.fixture(scope="module")
def printing():
    spec = importlib.util.spec_from_file_location("print_book", ROOT / "dev/print_book.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_printed_once_and_every_link_leads_into_the_file(book, printing):
    soup = printing.all_pages(book.html)
    written = {f"{path.relative_to(ROOT / 'book').with_suffix('')}".replace("/", "-") + "--"
               for path in (ROOT / "book").glob("*.md")}  # fmt: skip
    articles = [article["id"] for article in soup.find_all("article")]
    assert len(set(articles)) == len(articles) and written <= set(articles)
    names = {element["id"] for element in soup.select("[id]")}
    inner = [link["href"][1:] for link in soup.select('a[href^="#"]')]
    assert len(inner) > len(articles) and [name for name in inner if name not in names] == []

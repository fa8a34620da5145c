"""The book in one file, as `make pdf` prints it."""

import runpy

from a2lib.paths import ROOT


def test_every_page_is_printed_once_and_every_link_leads_into_the_file(book):
    printing = runpy.run_path(str(ROOT / "dev" / "print_book.py"))
    soup = printing["all_pages"](book.html)
    articles = [article["id"] for article in soup.find_all("article")]
    assert len(set(articles)) == len(articles)
    for page in (ROOT / "book").glob("*.md"):
        assert f"{page.stem}--" in articles
    names = {element["id"] for element in soup.select("[id]")}
    links = soup.select('a[href^="#"]')
    assert len(links) > len(articles)
    for link in links:
        assert link["href"][1:] in names

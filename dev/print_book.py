"""Print the built book as one PDF, with a browser: book/_build/a2lib.pdf (`make pdf`).

The articles of all pages, in the order of the table of contents, stand one behind the other in one
HTML file, whose links lead to the place in it. Chromium or Chrome, which has to be installed,
prints that.
"""

import shutil
import sys
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from bs4 import BeautifulSoup

from a2lib.paths import ROOT

HTML = ROOT / "book" / "_build" / "html"
PDF = HTML.parent / "a2lib.pdf"
PRINTED = HTML / "all-pages.html"
STYLE = """
@page { size: A4; margin: 18mm 16mm; }
body { font-size: 10pt; }
article { break-before: page; max-width: none; }
pre, table { font-size: 7.5pt; }
pre { white-space: pre-wrap; }
img, svg, table, pre { break-inside: avoid; }
.headerlink, .copybtn, .prev-next-footer { display: none !important; }
"""


def read(html: Path, page: str) -> BeautifulSoup:
    return BeautifulSoup((html / page).read_text(encoding="utf-8"), "html.parser")


def page_names(html: Path) -> list[str]:
    """Return the pages, such as "notebooks/flash.html", in the order of the sidebar."""
    sidebar = read(html, "index.html")
    links = sidebar.select("nav.bd-links a.internal")
    names = [urlsplit(link["href"]).path for link in links]
    return ["index.html", *(name for name in names if name.endswith(".html"))]


def anchor(page: str, fragment: str = "") -> str:
    """Return the name that a place of a page has in the one file."""
    return f"{page.removesuffix('.html').replace('/', '-')}--{fragment}"


def article_of(html: Path, page: str, pages: set[str]):
    """Return the article of a page, with every name, link and picture as the one file needs it."""
    article = read(html, page).find("article")
    for element in article.select("[id]"):
        element["id"] = anchor(page, element["id"])
    for fold in article.find_all("details"):
        fold["open"] = ""  # what is folded on a screen is read on paper
    for link in article.select("a[href]"):
        target = urlsplit(link["href"])
        path = urljoin(page, target.path) if target.path else page
        if not target.scheme and path in pages:
            link["href"] = "#" + anchor(path, target.fragment)
    for picture in article.select("img[src]"):
        if not urlsplit(picture["src"]).scheme:
            picture["src"] = urljoin(page, picture["src"])
    article["id"] = anchor(page)
    return article


def all_pages(html: Path) -> BeautifulSoup:
    """Return one page that holds the articles of all pages in `html`."""
    names = page_names(html)
    soup = read(html, "parallelism.html")  # its head loads MathJax
    soup.body.clear()
    style = soup.new_tag("style")
    style.string = STYLE
    soup.head.append(style)
    for name in names:
        soup.body.append(article_of(html, name, set(names)))
    return soup


def print_file(browser_path: str) -> None:
    """Print the one file with this browser, when its formulas are set."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium
        browser = chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="light")
        page.set_default_timeout(300_000)
        page.goto(PRINTED.as_uri())
        page.evaluate("window.MathJax ? MathJax.startup.promise.then(() => 0) : 0")
        page.pdf(path=PDF, prefer_css_page_size=True, outline=True, tagged=True)
        browser.close()


def main() -> int:
    if not (HTML / "index.html").is_file():
        print(f"{HTML}: no book; `make html` builds it", file=sys.stderr)
        return 1
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        print("no browser prints the book: install chromium or google-chrome", file=sys.stderr)
        return 1
    PRINTED.write_text(str(all_pages(HTML)), encoding="utf-8")
    try:
        print_file(browser_path)
    finally:
        PRINTED.unlink()
    print(f"The book as a PDF: {PDF}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

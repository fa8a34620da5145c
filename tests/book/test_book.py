"""The built book: every picture is there, every reference resolves, nothing is asked of the net."""

import functools
import re

import pytest
from bs4 import BeautifulSoup, NavigableString
from committed import WRITTEN

from a2lib.paths import ROOT

pytestmark = pytest.mark.slow


@functools.cache
def soup(page):
    """Return a page of the book, parsed once: a dozen tests read every page. Do not change it."""
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def test_the_links_from_the_book_to_the_top_resolve():
    for name in ("_config.yml", "_toc.yml", "notebooks"):
        link = ROOT / "book" / name
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert link.resolve() == (ROOT / name).resolve() and link.exists()


def test_every_picture_exists_and_has_a_description_and_a_figure_its_number(book):
    pictures = 0
    for page in book.pages():
        for image in soup(page).find_all("img"):
            source = image.get("src", "")
            where = f"{page.name}: {source}"
            if not source.startswith("data:"):
                assert (page.parent / source.split("?")[0]).is_file(), where
            if image.find_parent("article"):
                # Without a description docutils puts the address there.
                assert image.get("alt") and image["alt"] not in source, where
            figure = image.find_parent("figure")
            if figure:
                pictures += 1
                assert len(image.get("alt", "")) > 40, where
                assert figure.find(class_="caption-number"), where
    assert pictures >= 12


def test_no_cell_shows_an_empty_box(book):
    for page in book.pages():
        for output in soup(page).select("div.cell_output > div.output"):
            shown = output.get_text(strip=True) or output.find(["img", "svg", "object"])
            assert shown, f"{page.name}: {output.find_parent(class_='cell')}"


def test_references_to_figures_tables_and_equations_resolve(book):
    for page in book.pages():
        html = soup(page)
        for link in html.select("article a.reference.internal[href^='#']"):
            target = link["href"][1:]
            assert not target or html.find(id=target), f"{page.name}: {target}"
        # What Sphinx could not resolve is left as code with this class.
        assert not html.select("code.xref.std-numref, code.xref.eq"), page.name
        assert "(not measured yet)" not in html.get_text(), page.name


def addresses(html):
    """Yield everything in a page that a browser fetches without being asked, and its element."""
    for tag in html.find_all(True):
        names = ["src", "srcset", "poster", "data", "background"]
        if tag.name not in ("a", "area"):
            names += ["href", "xlink:href"]
        for name in names:
            if name in tag.attrs:
                yield tag.name, str(tag[name])
        for address in urls(tag.get("style", "")):
            yield tag.name, address
    for style in html.find_all("style"):
        for address in urls(style.text):
            yield "style", address


def urls(css):
    """Return the addresses that a style sheet loads."""
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    imported = re.findall(r"@import\s+['\"]([^'\"]+)", css)
    return imported + re.findall(r"url\(\s*['\"]?([^'\")]+)", css)


def test_no_page_asks_another_site_for_anything(book):
    away = re.compile(r"(?:https?:|wss?:)?//(?!www\.w3\.org/)", re.I)
    for page in book.pages():
        html = soup(page)
        for what, address in addresses(html):
            where = f"{page.name}: {what} {address}"
            assert not away.match(address.strip()), where
            local = re.split(r"[?#]", address.strip())[0]
            if what in ("script", "link") and local:
                assert (page.parent / local).exists(), where
        for script in html.find_all("script", src=False):
            assert not re.search(r"https?://", script.text), f"{page.name}: {script.text[:200]}"
    for sheet in book.html.rglob("*.css"):
        for address in urls(sheet.read_text(encoding="utf-8")):
            assert not away.match(address), f"{sheet.name}: {address}"


def test_no_page_holds_a_path_of_this_machine(book):
    for file in (*book.pages(), book.html / "_static" / "texts.js"):
        text = file.read_text(encoding="utf-8")
        for path in (str(book.root), str(ROOT), "/home/", "/root/"):
            assert path not in text, file.name


def test_the_chapter_shows_this_machine_beside_the_published_device(book):
    section = soup(book.html / "flash.html").find(id="what-of-this-page-holds-on-your-gpu")
    assert "CPU" in section.text and "H100" in section.text and section.find("table")
    assert not soup(book.html / "index.html").find(id="what-of-this-page-holds-on-your-gpu")


def test_every_head_of_a_table_says_what_it_heads(book):
    heads = 0
    for page in book.pages():
        for head in soup(page).find_all("th"):
            heads += 1
            assert head.get("scope") in ("col", "row"), head
            # A formula alone is no name: a screen reader finds none in what MathJax makes of it.
            outside = ""
            for text in head.find_all(string=True):
                outside += "" if text.find_parent(class_="math") else text
            assert outside.strip(), head
    assert heads > 100


def test_a_page_says_what_it_holds(book):
    said = set()
    for page in book.pages():
        if page.name in ("search.html", "genindex.html"):
            continue
        found = {}
        for tag in soup(page).find_all("meta"):
            found[tag.get("name") or tag.get("property")] = tag.get("content")
        assert len(found["description"]) > 40 and found["og:description"] == found["description"]
        assert found["og:title"] and found["og:site_name"].startswith("a2lib")
        assert not re.search(r"\b(?:19|20)\d\d\]", found["description"]), page.name
        said.add(found["description"])
    assert len(said) >= 6


LOOKED_UP = {"questions", "profile-kernels"}
HIDDEN = {"details", "svg", "script", "style", "pre"}
CLASSES = {"math", "headerlink", "a2-source", "sd-dropdown"}  # hidden too


def shown(tag, hidden=frozenset(HIDDEN)):
    """Yield the elements and texts that show before anything is unfolded, in order."""
    for child in tag.children:
        if type(child) is NavigableString:
            yield child
        elif child.name and child.name not in hidden and not CLASSES & {*child.get("class", ())}:
            yield child
            yield from shown(child, hidden)


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - LOOKED_UP))
def test_a_page_opens_with_what_was_found(book, name):
    """A lead, three or four things to take away, and a figure after them."""
    article = soup(book.html / f"{name}.html").find("article")
    assert article.select_one("h1 ~ p")
    first = {}
    for element in shown(article):
        first.setdefault(element.name, element)
    points, figure = first["ul"], first["figure"]
    assert len(points.find_all("li", recursive=False)) in (3, 4)
    assert (figure.sourceline > points.sourceline) == (name != "index")

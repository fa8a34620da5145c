"""A page is short enough to be read: what shows before anything is unfolded, counted as built."""

import re

import pytest
from bs4 import BeautifulSoup

from a2lib.paths import ROOT

LONG = {"benchmark", "profile", "memory", "compile", "ddp", "flash"}
LOOKED_UP = {"questions", "profile-kernels", "flash-shapes"}
WRITTEN = sorted(
    page.stem for page in (ROOT / "book").glob("*.md")
    if "from a2lib.report.page import" in page.read_text(encoding="utf-8")
)  # fmt: skip
HIDDEN = {"details", "svg", "script", "style", "pre"}
CLASSES = {"math", "headerlink", "a2-source", "sd-dropdown"}  # hidden too


def article(book, name):
    html = (book.html / f"{name}.html").read_text(encoding="utf-8")
    found = BeautifulSoup(html, "html.parser").find("article")
    hidden = found.find_all(lambda tag: tag.name in HIDDEN or CLASSES & {*tag.get("class", ())})
    for one in hidden:  # `select` finds the same, and takes as long as parsing
        one.decompose()
    return found


def words(found):
    return [w for w in found.get_text(" ").split() if re.search(r"\w", w)]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_opens_with_what_was_found_and_keeps_its_budget(book, name):
    """Title, a short lead, three things to take away, and a figure, in that order."""
    shown = article(book, name)
    if name not in LOOKED_UP:
        assert len(words(shown.select_one("h1 ~ p"))) <= 80
        points = shown.find("ul")
        assert len(points.find_all("li", recursive=False)) in (3, 4)
        assert (shown.find("figure").sourceline > points.sourceline) == (name != "index")
    tables = shown.find_all("table")
    lines = [len(table.select("tbody tr")) for table in tables]
    assert len(shown.find_all("figure")) <= 5
    for table in tables:
        table.decompose()
    assert len(words(shown)) <= (400 if name == "index" else 1300 if name in LONG else 1000)
    if name != "questions":  # four tables of lines to be looked up
        assert len(tables) <= 3 and max(lines, default=0) <= 8


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - LOOKED_UP))
def test_a_lead_has_few_numbers(name):
    text = (ROOT / "book" / f"{name}.md").read_text(encoding="utf-8")
    lead = re.search(r"^# .*\n+(?:`{3}\{code-cell\}[\s\S]*?^`{3}\n+)?((?:.+\n)+)", text, re.M)[1]
    assert lead.count("{eval}") <= 5

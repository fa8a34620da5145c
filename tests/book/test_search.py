"""The search of the book: the right chapter first, read from a disk.

Runs where a Chromium is installed, as test_browser.py does.
"""

import json
import re

import pytest

from a2lib.paths import ROOT

pytestmark = pytest.mark.slow


def attributes(tab, selector, name):
    return tab.locator(selector).evaluate_all(f"all => all.map((a) => a.getAttribute('{name}'))")


# What a reader types, and the file of the chapter that is to come first.
QUERIES = {
    "why is my first step slow": "benchmark", "FlashAttention vs cuDNN": "flash",
    "bf16 layernorm": "mixed_precision", "fsdp": "fsdp", "DDP": "ddp",
    "torch.compile gain": "compile", "CUDA graph": "benchmark", "out of memory": "memory",
    "activation checkpointing": "checkpointing", "ZeRO": "sharded_optimizer",
    "all-reduce bandwidth": "collectives", "AMP": "mixed_precision",
    "how large should a bucket be": "ddp", "online softmax": "flash-derivation",
    "tensor parallelism": "parallelism", "pipeline bubble": "parallelism-axes",
    "sequence parallelism": "sequence-parallelism", "Llama 3 405B layout": "layout-405b",
    "nccl vs gloo": "collectives", "will my model fit on 8 GPUs": "layout-405b",
    "nsys trace of a training step": "profile", "what does torch.compile fuse": "compile",
    "when is fully sharded data parallel slower": "fsdp",
}  # fmt: skip


def test_the_search_finds_the_right_chapter_first(book, open_page):
    records = json.loads((ROOT / "book" / "_ext" / "search.json").read_text(encoding="utf-8"))
    assert [page for page in records["pages"] if not (book.html / f"{page}.html").is_file()] == []
    tab = open_page("search.html")
    first = {}
    for query in QUERIES:
        tab.fill(".bd-search-container input[name=q]", query)
        assert re.match(r"\d+ sections? with", tab.text_content("[role=status]")), query
        first[query] = attributes(tab, ".a2-results a", "href")[0].split(".html")[0]
    assert first == QUERIES


def test_the_search_quotes_sections_from_a_disk(open_page):
    tab = open_page("search.html", query="?q=atomic+additions")
    marks = tab.locator(".a2-results mark").all_text_contents()
    assert marks and {mark.lower() for mark in marks} <= {"atomic", "addition", "additions"}
    with tab.expect_navigation():
        tab.locator(".a2-results a").first.click()
    assert tab.evaluate("!!document.getElementById(location.hash.slice(1))")


WORDS = """A2_WORDS = {
  "stop": "a of the", "same": [["tile", "block of keys"]], "pages": {"d": ["mill"]},
}"""
TEXTS = """A2_TEXTS = [
  ["notebooks/x", "Lab record: X", "all", "All rows", "tile tile tile", "4.99", 0.3, ""],
  ["a", "A", "one", "One", "A tile of a matrix.", "", 1, ""],
  ["b", "B", "tiles", "Tiles", "How many there are.", "", 1, ""],
  ["c", "C", "all", "Words", "a <b>textile</b> mill", "", 1, ""],
  ["d", "D", "d", "D", "Each block of keys.", "", 1, ""],
  ["d", "D", "more", "More", "Nothing else.", "", 1, "sizes-chosen"],
]"""


def test_the_search_ranks_headings_then_prose_then_records(browser, book, tmp_path):
    page = tmp_path / "search.html"
    script = (book.html / "_static" / "search.js").read_text()
    form = '<div class="bd-search-container"><input name="q"></div><p id="search-results"></p>'
    page.write_text(f"{form}<script>{WORDS}\n{TEXTS}</script><script>{script}</script>")
    tab = browser.new_page()
    tab.goto(page.as_uri() + "?q=tile")

    def found(query):
        tab.fill("input", query)
        return attributes(tab, ".a2-results a", "href")

    expected = ["b.html#tiles", "a.html#one", "d.html#d", "notebooks/x.html#all", "c.html#all"]
    assert attributes(tab, ".a2-results a", "href") == expected
    assert tab.locator(".a2-results b").count() == 0  # words of a page are never HTML
    assert found("the tile of many")[0] == "b.html#tiles"  # which has both; stop words are none
    assert found("mill")[0] == "d.html#d"  # a page by what it is looked for by
    assert found("sizes") == ["d.html#more"]  # a section by its label
    assert found("4.99") == ["notebooks/x.html#all"]  # in a table's cell: found, and not quoted
    assert tab.text_content(".a2-results p") == "tile tile tile"
    assert found("the")  # a stop word alone is looked for
    assert found("tile nowhere") == expected
    said = tab.text_content("[role=status]")
    assert said == "5 sections with “tile nowhere”; none with “nowhere”"
    assert found("textil") == ["c.html#all"] and found("txtile") == []
    assert tab.text_content("[role=status]") == "No sections with “txtile”"
    assert attributes(tab, ".a2-instead a", "href") == ["?q=textile", "questions.html"]
    assert found("") == [] and tab.locator(".a2-instead").count() == 0
    tab.close()

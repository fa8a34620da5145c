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

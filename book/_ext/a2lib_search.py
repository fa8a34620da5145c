"""A search that works on a page read from a disk, with excerpts and links to sections.

Sphinx's own search fetches each page it quotes, which a browser forbids on file://. Here the texts
themselves are a script, texts.js, that search.html alone loads; pages/search.js looks in them. What
words mean the same, which are no help, and what else a page is looked for by is in search.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from a2lib_records import called, is_record
from docutils import nodes
from sphinx import addnodes
from sphinx_design.dropdown import dropdown_main

FILE = Path("_static") / "texts.js"
WORDS, TEXTS = "A2_WORDS = ", "A2_TEXTS = "
# Logs, indices and pages of tables hold every word, and are seldom what a reader looks for.
WEIGHTS = {r"^notebooks/": 0.3, r"^(questions|references|glossary|index)$": 0.4,
           r"-(shapes|kernels)$": 0.6}  # fmt: skip
SKIPPED = (nodes.section, nodes.raw, nodes.comment, nodes.math_block, nodes.image, nodes.pending,
           nodes.substitution_definition, addnodes.toctree, addnodes.index)  # fmt: skip
IS_NUMBER = re.compile(r"[\d.,×()%\s·–+-]*(?:[KMG]?i?B|ms)?|oom|n/a", re.I)


def gather(app, page, _template, _context, doctree) -> None:
    """Keep the texts of a page's sections as it is written."""
    if doctree is None:
        return
    # Of a record without code and what it printed: thousands of numbers outweigh a chapter.
    skipped = (*SKIPPED, nodes.literal_block) if is_record(page) else SKIPPED
    weight = next((w for pattern, w in WEIGHTS.items() if re.search(pattern, page)), 1)
    entries = []
    for part in doctree.findall(_is_part):
        words, numbers = [], []
        for child in part.children[1:]:
            _collect(child, words, numbers, skipped)
        title, heading = called(app, page), _plain(part[0]).strip()
        text, cells = _joined(words), _joined(numbers)
        anchor, *labels = part["ids"]
        entries.append([page, title, anchor, heading, text, cells, weight, " ".join(labels)])
    _texts(app)[page] = entries


def _joined(texts: list[str]) -> str:
    """Return the texts as one line, each once: many tables of a section may have the same cell."""
    return re.sub(r"\s+", " ", " ".join(dict.fromkeys(texts))).strip()


def _is_part(node) -> bool:
    """Return whether a node has a heading and an anchor: a section, or a fold with a label."""
    return isinstance(node, nodes.section) or isinstance(node, dropdown_main) and bool(node["ids"])


def write(app, exception) -> None:
    """Write texts.js: the pages of this build, and what an earlier one knew of the others."""
    if exception or app.builder.name != "html":
        return
    file = Path(app.outdir) / FILE
    of_pages: dict[str, list] = {}
    if file.is_file():
        texts = file.read_text(encoding="utf-8").partition(TEXTS)[2]
        for entry in json.loads(texts):
            of_pages.setdefault(entry[0], []).append(entry)
    of_pages |= _texts(app)
    entries = []
    for page in sorted(of_pages):
        if page in app.env.found_docs:
            entries += of_pages[page]
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    words = json.dumps(json.loads((Path(__file__).parent / "search.json").read_text("utf-8")))
    file.write_text(f"{WORDS}{words}\n{TEXTS}[\n{lines}\n]\n", encoding="utf-8")


def _collect(node, words: list[str], numbers: list[str], skipped: tuple) -> None:
    """Add the words under a node, and apart from them the table cells that are numbers."""
    if isinstance(node, skipped) or _is_part(node) or "a2-measure" in node.get("classes", ()):
        return
    if isinstance(node, nodes.entry | nodes.literal_block):
        text = _plain(node)
        (numbers if IS_NUMBER.fullmatch(text) else words).append(text)
    elif isinstance(node, nodes.TextElement):
        words.append(_plain(node))
    else:
        for child in node.children:
            _collect(child, words, numbers, skipped)


def _plain(node) -> str:
    """Return the words of a node, without the HTML that an extension put among them."""
    if isinstance(node, SKIPPED):
        return ""
    if isinstance(node, nodes.Text):
        return node.astext()
    if isinstance(node, nodes.math):  # N \\times N as N × N, the rest without its commands
        text = node.astext().replace("\\times", "×").replace("\\infty", "∞")
        return re.sub(r"\\[A-Za-z]+ ?|[{}\\]", "", text)
    between = "" if isinstance(node, nodes.TextElement) else " "
    return between.join(_plain(child) for child in node.children)


def _texts(app) -> dict[str, list]:
    if not hasattr(app, "a2lib_texts"):
        app.a2lib_texts = {}
    return app.a2lib_texts


def skip_sphinx_index(app) -> None:
    """Make and write no index of Sphinx's own, which no page of this book loads."""
    app.builder.index_page = lambda *_page: None
    app.builder.dump_search_index = lambda: None


def setup(app) -> dict:
    app.connect("builder-inited", skip_sphinx_index)
    app.connect("html-page-context", gather)
    app.connect("build-finished", write)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": False}

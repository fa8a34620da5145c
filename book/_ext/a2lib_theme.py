"""What is changed of the theme's pages: weight that nobody reads, and names that a control lacks.

One table, CHANGES, holds every change. A pattern that occurs on no page fails the build, so that a
new version of the theme is noticed and not half patched.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.util import logging

logger = logging.getLogger(__name__)


def _words(html: str) -> str:
    """The words of a piece of HTML, for an attribute."""
    return " ".join(re.sub(r"<[^>]*>", "", html).replace('"', "&quot;").split())


DONE = "<!-- a2lib: patched -->"
CHANGES = (
    # 1.5 MB of script that draws icons which the theme's web fonts draw as well.
    (r"\s*<!-- So that users can add custom icons -->\s*<script[^>]*fontawesome\.js[^>]*></script>",
     ""),
    # Sphinx's search reads pages over a network; a2lib_search.py has another.
    (r'\s*<script src="[^"]*(?:searchtools|language_data|searchindex)\.js"></script>', ""),
    (r'<div id="search-results"></div>',
     '<div id="search-results"></div>\n    <script defer src="_static/texts.js"></script>'
     '<script defer src="_static/search.js"></script>'),
    # An empty place for advertisements of a host.
    (r'<div id="ethical-ad-placement".*?</div>', ""),
    # Names for controls that show an icon alone, and none beside words that are there already.
    (r'(<a [^>]*>)((?:(?!</a>).)*)(</a><details[^>]*><summary)(?=><span class="toctree-toggle")',
     lambda m: f'{m[0]} aria-label="Pages of {_words(m[2])}"'),
    (r'(<span class="toctree-toggle") role="presentation"', r"\1"),
    (r'(<button class="btn search-button-field[^"]*") title="Search" aria-label="Search"', r"\1"),
    (r'(<button class="sidebar-toggle [^"]*") title="([^"]*)"', r'\1 aria-label="\2" title="\2"'),
    (r'(class="btn btn-sm btn-fullscreen-button[^"]*"\s+)title="([^"]*)"',
     r'\1aria-label="\2" title="\2"'),
    # Everything on a page belongs to a landmark. The title and the search are scrolled together.
    (r'<div class="sidebar-primary-item">(\s*<a class="navbar-brand logo".*?</a>)</div>'
     r'(\s*<div class="sidebar-primary-item">\s*<button class="btn search-button-field.*?</div>)',
     r'<div class="a2-top"><nav class="sidebar-primary-item" aria-label="Home">\1</nav>\2</div>'),
    # The mode is none of the theme's own on a first visit, which it says in the console.
    (r'dataset\.mode = localStorage\.getItem\("mode"\) \|\| "";',
     'dataset.mode = localStorage.getItem("mode") || "auto";'),
    # Roles that these elements may not have.
    (r' role="list"', ""),
    (r' role="doc-biblioentry"', ""),
)  # fmt: skip
# MyST escapes the & of an address, and Sphinx does it again. Not every book has such an address.
TWICE = re.compile(r'&amp;amp;(?=[^<>"]*">)')
# Source maps, translations, and what CHANGES took the tags of.
DROPPED = ("*.map", "fontawesome.js*", "locales/**/*", "searchtools.js",
           "language_data.js", "*webpack-macros.html")  # fmt: skip


def change_pages(app, exception) -> None:
    """Apply CHANGES to every page that this build wrote, and drop what no page asks for."""
    if exception or app.builder.name != "html":
        return
    out = Path(app.outdir)
    pages = [page for page in sorted(out.rglob("*.html")) if "_static" not in page.parts]
    new = [page for page in pages if DONE not in page.read_text(encoding="utf-8")]
    for pattern, times in patch(new).items():
        if not times and len(new) == len(pages):
            logger.warning("a2lib_theme: on no page of the theme is there %s", pattern)
    for pattern in DROPPED:
        for file in (out / "_static").rglob(pattern):
            if file.is_file():
                file.unlink()


def patch(pages: list[Path]) -> dict[str, int]:
    """Change pages in place; returns how often each pattern occurred."""
    times = dict.fromkeys((pattern for pattern, _ in CHANGES), 0)
    for page in pages:
        html = page.read_text(encoding="utf-8")
        for pattern, replacement in CHANGES:
            html, n = re.subn(pattern, replacement, html, flags=re.S)
            times[pattern] += n
        html = TWICE.sub("&amp;", html)
        page.write_text(html.rstrip() + f"\n{DONE}\n", encoding="utf-8")
    return times


def setup(app) -> dict:
    app.connect("build-finished", change_pages, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

"""Give the book what it needs of Sphinx beyond its configuration.

1. No page asks another site for anything. Jupyter Book always loads sphinx-thebe, whose script on
   every page names a CDN; its hooks are taken out. Scripts that two extensions add are kept once.
2. A page whose cells read data/ is stale when data/ or the code of report or theory changes,
   although its own text does not; Sphinx is told so.
3. Jupyter Book puts every script and style sheet below _static on every page. What only some pages
   need lies in _ext/pages, which becomes a static folder after that scan: MathJax comes with the
   pages that hold equations, the search with search.html.
4. A page says in a sentence what it holds, for previews and search engines: its `description:`.

Lab records, tables, cells, the search, the directive `measure` and the reference of functions are
in the modules beside this one.
"""

from __future__ import annotations

import hashlib
import html
import re
from pathlib import Path

from a2lib_records import called
from docutils import nodes

import a2lib
from a2lib.paths import ROOT
from a2lib.report.data import data_roots


def drop_thebe(app, _config) -> None:
    """Disconnect every hook of sphinx-thebe."""
    for listeners in app.events.listeners.values():
        listeners[:] = [
            listener
            for listener in listeners
            if not listener.handler.__module__.startswith("sphinx_thebe")
        ]


def add_pages_folder(_app, config) -> None:
    """Make _ext/pages a static folder, now that Jupyter Book has looked for scripts."""
    config.html_static_path.append("_ext/pages")


def name_version(_app, config) -> None:
    """Have the foot of each page name the version of the package."""
    config.html_theme_options["extra_footer"] = f"a2lib {a2lib.__version__}"


def describe(app, page, _template, context, doctree) -> None:
    """Put a description and the tags of a preview into the page's head."""
    if doctree is None:
        return
    text = app.env.metadata.get(page, {}).get("description") or first_sentences(doctree)
    tags = {
        "og:title": called(app, page),
        "og:type": "article",
        "og:site_name": app.config.html_title,
        "og:description": text,
    }
    lines = [f'<meta name="description" content="{html.escape(text)}" />']
    for name, value in tags.items():
        lines.append(f'<meta property="{name}" content="{html.escape(value)}" />')
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def first_sentences(doctree, most: int = 200) -> str:
    """Return the start of a page's first paragraph of prose."""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section):
            text = re.sub(r"\s+", " ", paragraph.astext())
            if len(text) > 40:
                return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " …"
    return doctree.astext().strip().split("\n")[0]


def files_once(app, _page, _template, context, _doctree) -> None:
    """Keep the first of equal script tags, and no script or style sheet of thebe's."""
    seen, kept = set(), []
    for script in context.get("script_files", []):
        body = getattr(script, "attributes", {}).get("body")
        key = (str(getattr(script, "filename", script)), str(body))
        if key not in seen and "thebe" not in "".join(key).lower():
            seen.add(key)
            kept.append(script)
    context["script_files"] = kept
    context["css_files"] = [
        sheet for sheet in context.get("css_files", [])
        if "thebe" not in str(getattr(sheet, "filename", sheet))
    ]  # fmt: skip


def empty_icon_script(app, exception) -> None:
    """Leave nothing of a script of 1.5 MB on every page: it draws icons for which the theme has web
    fonts."""
    if exception is None and app.builder.name == "html":
        (Path(app.outdir) / "_static" / "scripts" / "fontawesome.js").write_text("")


def stale_pages(app, env, _added, _changed, _removed) -> list[str]:
    """Return every page that runs code, if the files that cells read have changed."""
    digest = hashlib.sha256()
    files = [file for root in [*data_roots(), ROOT / "data"] for file in root.rglob("*.csv")]
    for part in ("report", "theory"):
        files += (ROOT / "src" / "a2lib" / part).rglob("*.py")
    for file in sorted(set(files)):
        digest.update(str(file).encode() + b"\0" + file.read_bytes())
    before, env.a2lib_digest = getattr(env, "a2lib_digest", None), digest.hexdigest()
    if before == env.a2lib_digest:
        return []
    return [page for page in env.found_docs
            if "{code-cell}" in _text(Path(env.doc2path(page)))]  # fmt: skip


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.suffix == ".md" else ""


def setup(app) -> dict:
    parts = ("records", "tables", "search", "cells", "measure", "api", "references")
    for part in parts:
        app.setup_extension(f"a2lib_{part}")
    app.add_js_file("page.js", loading_method="defer")
    app.connect("config-inited", drop_thebe, priority=1)
    app.connect("config-inited", add_pages_folder, priority=900)
    app.connect("config-inited", name_version, priority=900)
    app.connect("html-page-context", describe)
    app.connect("html-page-context", files_once, priority=999)
    app.connect("env-get-outdated", stale_pages)
    app.connect("build-finished", empty_icon_script)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

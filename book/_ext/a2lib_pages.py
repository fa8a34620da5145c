"""What the book needs of Sphinx beyond its configuration.

1. No page asks another site for anything. Jupyter Book always loads sphinx-thebe, whose script on
   every page names a CDN; its hooks are taken out. Scripts that two extensions add are kept once.
2. A page whose cells read data/ is stale when data/ or the report's code changes, although its own
   text does not; Sphinx is told so.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

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


def stale_pages(app, env, _added, _changed, _removed) -> list[str]:
    """Every page that runs code, if what its cells read is not what it was."""
    digest = hashlib.sha256()
    files = [file for root in [*data_roots(), ROOT / "data"] for file in root.rglob("*.csv")]
    files += (ROOT / "src" / "a2lib" / "report").rglob("*.py")
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
    app.connect("config-inited", drop_thebe, priority=1)
    app.connect("html-page-context", files_once, priority=999)
    app.connect("env-get-outdated", stale_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

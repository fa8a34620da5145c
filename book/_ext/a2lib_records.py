"""Lab records: the executed notebooks, one to a chapter.

A reader comes to one from its chapter, so next and previous pass over them, and their names are
those of _toc.yml: a notebook's own title is often its chapter's.
"""

from __future__ import annotations

import html


def is_record(page: str) -> bool:
    """Return whether a page is an executed notebook."""
    return page.startswith("notebooks/")


def called(app, page: str) -> str:
    """Return the title under which other pages name a page, as plain text."""
    title = app.env.external_site_map[page].title if is_record(page) else None
    return title or app.env.titles[page].astext()


def follow(app, page, _template, context, doctree) -> None:
    """Lead from chapter to chapter, and from a lab record back to its own."""
    if doctree is None:
        return
    relations = app.builder.relations

    def link(other):
        title = app.builder.render_partial(app.env.titles[other])["title"]
        return {"link": app.builder.get_relative_uri(page, other), "title": title}

    if is_record(page):
        context["title"] = html.escape(called(app, page))
        chapter = context["prev"] = link(relations[page][0])
        context["next"] = None
        line = (f'<p class="a2-record">Lab record, the executed notebook, of '
                f'<a href="{chapter["link"]}">{chapter["title"]}</a></p>')  # fmt: skip
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{line}", 1)
        return
    for way, place in (("prev", 1), ("next", 2)):
        other = relations[page][place] if page in relations else None
        while other and is_record(other):
            other = relations[other][place]
        context[way] = link(other) if other else None


def setup(app) -> dict:
    app.connect("html-page-context", follow)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

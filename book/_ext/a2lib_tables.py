"""Tables that a screen reader can follow.

The first columns of a table of class `dataframe` are the names of its lines (docutils calls such a
column a stub and writes `th`); the class `keys-2` says that there are two. Every `th` says whether
it heads a column or a row.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform


class RowHeads(SphinxPostTransform):
    """Make the key columns of measured tables head their rows."""

    default_priority = 500

    def run(self, **_options) -> None:
        for table in self.document.findall(nodes.table):
            classes = table.get("classes", [])
            if "dataframe" in classes:
                keys = [int(name[5:]) for name in classes if re.fullmatch(r"keys-\d+", name)]
                columns = list(table.findall(nodes.colspec))
                for column in columns[: keys[0] if keys else 1]:
                    column["stub"] = 1


def scopes(_app, _page, _template, context, _doctree) -> None:
    """Mark each table head in the page's body as the head of a column or of a row."""
    body = context.get("body")
    if body:
        body = re.sub(r"<thead>.*?</thead>", lambda m: _scoped(m[0], "col"), body, flags=re.S)
        body = _scoped(body, "row")
        # A head without a word heads nothing.
        context["body"] = re.sub(r'<th\b(?: scope="\w+")?([^>]*)>(\s*(?:<p>\s*</p>)?\s*)</th>',
                                 r"<td\1>\2</td>", body)  # fmt: skip


def _scoped(html: str, scope: str) -> str:
    return re.sub(r"<th(?=[\s>])(?![^>]*\bscope=)", f'<th scope="{scope}"', html)


def setup(app) -> dict:
    app.add_post_transform(RowHeads)
    app.connect("html-page-context", scopes)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

"""Tables that a screen reader can follow, and numbers that keep their unit.

The first columns of a table of class `dataframe` are the names of its lines (docutils calls such a
column a stub and writes `th`); the class `keys-2` says that there are two. Every `th` says whether
it heads a column or a row. Between a number and its unit no line may break.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

UNITS = (
    "ms µs ns s B KiB MiB GiB TiB kB MB GB TB GB/s TB/s GiB/s FLOP/s GFLOP/s TFLOP/s MHz GHz W kW "
    "% × px tokens bytes bit bits heads GPUs"
).split()
UNIT = rf" (?=(?:{'|'.join(map(re.escape, UNITS))})(?![\w/]))"
NUMBER_AND_UNIT, UNIT_FIRST = re.compile(rf"(?<=\d){UNIT}"), re.compile(rf"^{UNIT}")
KEEP = (nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.raw, nodes.comment)


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


class UnitsStay(SphinxPostTransform):
    """Put a no-break space between a digit and a unit, outside code and mathematics."""

    default_priority = 510

    def run(self, **_options) -> None:
        before = None
        for text in list(self.document.findall(nodes.Text)):
            kept = text
            if " " in text and not any(isinstance(node, KEEP) for node in _above(text)):
                kept = NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", text)
                # A number that is computed in its place is a node of its own.
                if before and before[-1:].isdigit() and _block(before) is _block(text):
                    kept = UNIT_FIRST.sub("\N{NO-BREAK SPACE}", kept)
            before = text
            if kept != text:
                before = nodes.Text(kept)
                text.parent.replace(text, before)


def _block(node):
    """Return the paragraph, or another block, that a node is in."""
    for parent in _above(node):
        if not isinstance(parent, nodes.Inline):
            return parent
    return None


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


def _above(node):
    """Yield the parent of a node, its parent, and so on."""
    while node.parent:
        node = node.parent
        yield node


def setup(app) -> dict:
    app.add_post_transform(RowHeads)
    app.add_post_transform(UnitsStay)
    app.connect("html-page-context", scopes)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

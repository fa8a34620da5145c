"""The directive `measure`: the cells of a notebook by which a chapter's rows were measured.

    ```{measure} flash
    :cells: cases measure
    :functions: measure_ladder
    ```

shows, in a fold, the source of the code cells of notebooks/flash.ipynb that have a tag in `cells`
(by default the tag `measure`). Where `functions` is given, only cells that define one of them are
shown; with `only` in place of `functions`, these functions alone, without the rest of their cells.
The fold links the executed notebook, and the notebook as a file. A notebook, tag or
function that does not exist ends the build.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

from docutils.parsers.rst import directives
from sphinx.errors import SphinxError
from sphinx.util.docutils import SphinxDirective

FOLD = """\
``````````{{dropdown}} How this was measured
This code of `notebooks/{name}.ipynb` defines what is measured, and how.
The {{doc}}`lab record </notebooks/{name}>` shows the whole notebook as it ran;
{{download}}`as a file </notebooks/{name}.ipynb>` it runs where a2lib is installed.

{code}
``````````"""
# The class keeps the code out of the search's texts, where it would outweigh the chapter's prose.
CODE = "`````````{{code-block}} python\n:class: a2-measure\n\n{source}\n`````````\n"


class MeasureError(SphinxError):
    """A directive names what its notebook does not have; Sphinx prints category and message."""

    category = "measure"


class Measure(SphinxDirective):
    required_arguments = 1
    option_spec = dict.fromkeys(("cells", "functions", "only"), directives.unchanged)

    def run(self) -> list:
        name = self.arguments[0]
        path = Path(self.env.srcdir) / "notebooks" / f"{name}.ipynb"
        tags = self.options.get("cells", "measure").split()
        functions = self.options.get("functions", "").split()
        only = self.options.get("only", "").split()
        try:
            sources = select_cells(path, tags, functions or only)
            if only:
                sources = select_functions(sources, only)
        except MeasureError as error:
            raise MeasureError(f"{self.env.docname}.md: {error}") from None
        self.env.note_dependency(str(path))
        code = "\n".join(CODE.format(source=source) for source in sources)
        return self.parse_text_to_nodes(FOLD.format(name=name, code=code))


def select_cells(path: Path, tags: list[str], functions: list[str]) -> list[str]:
    """Return the sources of a notebook's code cells that have one of `tags` and, where `functions`
    are given, define one of them. Raises MeasureError if a file, tag or function is missing."""
    if not path.is_file():
        names = [other.stem for other in path.parent.glob("*.ipynb")]
        require("notebook", [path.stem], names, path.parent.name)
    tags_of = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            tags_of["".join(cell["source"])] = set(cell["metadata"].get("tags", []))
    require("code cell with tag", tags, set().union(*tags_of.values()), path.name)
    sources = [source for source in tags_of if tags_of[source] & set(tags)]
    if not functions:
        return sources
    defined = {source: defined_functions(source) for source in sources}
    require("cell that defines", functions, set().union(*defined.values()), path.name)
    return [source for source in sources if defined[source] & set(functions)]


def select_functions(sources: list[str], functions: list[str]) -> list[str]:
    """Return the sources of these functions, in the order in which the cells define them."""
    found = []
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name in functions:
                found.append(ast.get_source_segment(source, node))
    return found


def require(kind: str, names: list[str], present, where: str) -> None:
    """Raise MeasureError for the first of `names` that is not `present`."""
    for name in names:
        if name not in present:
            allowed = ", ".join(sorted(present)) or "none"
            raise MeasureError(f"no {kind} '{name}' in {where}; there: {allowed}")


def defined_functions(source: str) -> set[str]:
    """Return the names of the functions that a cell defines."""
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


def setup(app) -> dict:
    app.add_directive("measure", Measure)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

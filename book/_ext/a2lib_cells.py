"""The cells of a page, and the expressions in its text, run in the process that builds the book.

MyST-NB would start a Jupyter kernel for each page, which imports pandas and matplotlib and reads
the rows anew: half of a build. A page's names are its own here as there.
"""

from __future__ import annotations

import ast
import contextlib
import gc

from matplotlib import pyplot
from matplotlib.figure import Figure
from myst_nb.core import execute
from nbformat import NotebookNode

from a2lib.report.style import svg

SHOWN = {"image/svg+xml": "_repr_svg_", "text/markdown": "_repr_markdown_",
         "text/html": "_repr_html_"}  # fmt: skip


class HereClient(execute.NotebookClientBase):
    """Run a page's cells and expressions for MyST-NB's `inline` mode. An error in a cell ends the
    build; an error in an expression of the text is a warning."""

    def start_client(self) -> None:
        self.notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
        self._names: dict = {}

    def code_cell_outputs(self, cell_index: int) -> tuple[None, list]:
        cell = self.notebook.cells[cell_index]
        cell.outputs = self.eval_variable(cell.source)
        figure = cell.metadata.get("mystnb", {}).get("figure")
        if figure and not any("image/svg+xml" in output.data for output in cell.outputs):
            raise ValueError(
                f"{self.path.name}: the cell of the figure {figure.get('name')} shows no image; "
                "its last line has to be a chart, or a figure or axes of matplotlib"
            )
        return None, cell.outputs

    def eval_variable(self, name: str) -> list:
        """Run code; return the output of its last line if that is an expression."""
        code, last = ast.parse(name), None
        if isinstance(code.body[-1], ast.Expr):
            last = ast.Expression(code.body.pop().value)
        with contextlib.chdir(self.path.parent):  # as a kernel would be
            exec(compile(code, self.path, "exec"), self._names)
            value = eval(compile(last, self.path, "eval"), self._names) if last else None
            looks = _looks(value)
        looks = looks or {"text/plain": repr(value)}
        if value is None or not any(looks.values()):
            return []
        # nbformat's new_output would hold each against a schema.
        return [NotebookNode(output_type="execute_result", metadata=NotebookNode(),
                             execution_count=None, data=NotebookNode(looks))]  # fmt: skip


def _looks(value: object) -> dict[str, str]:
    """Return what a value looks like by kind: a figure, or what is part of one, as a chart does."""
    figure = getattr(value, "figure", None)
    if isinstance(figure, Figure) and not hasattr(value, "_repr_svg_"):
        pyplot.close(figure)  # which would keep it to the end of the build
        return {"image/svg+xml": svg(figure)}
    return {kind: getattr(value, look)() for kind, look in SHOWN.items() if hasattr(value, look)}


def setup(_app) -> dict:
    execute.NotebookClientInline = HereClient
    gc.set_threshold(50_000, 20, 20)  # by default a tenth of a build goes over pages for garbage
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

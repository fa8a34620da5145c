"""Make an executed notebook fit to be committed.

    python dev/clean_notebook.py notebooks/flash.ipynb

Kept are sources, outputs and the kernel. Dropped are times of execution, papermill's block, local
paths, and the cell of injected parameters: papermill leaves such a cell in place when it is given
none of its own, so the committed copy would repeat the published sweep on every machine. What was
run stands in the notebook's own output.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat

from a2lib.lab.runs import scrub

# Cells that papermill adds: parameters of one run, and banners about an error.
ADDED = {"injected-parameters", "papermill-error-cell-tag"}
DROPPED = {"papermill", "execution", "collapsed", "scrolled"}  # of a cell's metadata
KEPT = {"kernelspec", "language_info"}  # of the notebook's


class NotACleanRun(ValueError):
    """The notebook holds an error, or a code cell that was not run: it is no record of a run."""


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Clean an executed notebook in place, and return it. Raises NotACleanRun."""
    notebook.cells = [c for c in notebook.cells if not ADDED & set(c.metadata.get("tags", ()))]
    notebook.metadata = {name: notebook.metadata[name] for name in KEPT & set(notebook.metadata)}
    for cell in notebook.cells:
        unwanted = DROPPED if cell.metadata.get("tags") else {*DROPPED, "tags"}
        cell.metadata = {name: v for name, v in cell.metadata.items() if name not in unwanted}
    for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        if cell.execution_count is None and cell.source.strip():
            raise NotACleanRun(f"a cell was not run: {cell.source.splitlines()[0]}")
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "error":
                raise NotACleanRun(f"it holds an error: {output.ename}: {output.evalue}")
            if output.output_type == "execute_result":
                output.execution_count = count
            if output.output_type == "stream":
                output.text = scrub(output.text)
            for kind, content in output.get("data", {}).items():
                if kind == "text/html":  # the end of a tag looks like a folder
                    output.data[kind] = re.sub(">[^<]+", lambda text: scrub(text[0]), content)
                elif kind.startswith("text/"):
                    output.data[kind] = scrub(content)
    nbformat.validate(notebook)
    return notebook


def main(arguments: list[str] | None = None) -> int:
    """Clean each file in place; 1 where one is no record of a run, which is then left as it is."""
    parser = argparse.ArgumentParser(description="Make executed notebooks fit to be committed.")
    parser.add_argument("notebooks", nargs="+", type=Path)
    failed = 0
    for path in parser.parse_args(arguments).notebooks:
        try:
            cleaned = clean(nbformat.read(path, as_version=4))
        except (NotACleanRun, nbformat.reader.NotJSONError, OSError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            failed = 1
        else:
            nbformat.write(cleaned, path)
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""What an executed notebook shows, and what it stored."""

import csv


def texts(notebook):
    """Each output as text: what was printed, or shown beside an image or as a table."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield output.get("text", "") + output.get("data", {}).get("text/plain", "")


def figures(notebook):
    """How many of its outputs are figures."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def rows(measured, section, **cells):
    """The rows of a section, all of the notebook's runs and with these cells."""
    with open(measured / "runs.csv", newline="") as file:
        runs = {run["run"] for run in csv.DictReader(file)}
    with open(measured / section / "cpu.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert {row["run"] for row in found} <= runs
    for name, cell in cells.items():
        assert {row[name] for row in found} == {str(cell)}, name
    return found

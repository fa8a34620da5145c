"""The cells of a notebook that hold its experiment, run with its sweeps or without them."""

import itertools
import json
from types import SimpleNamespace

import committed

from a2lib.lab import read_section, sweep
from a2lib.lab.notebook import Run
from a2lib.lab.sections import COMMON
from a2lib.paths import ROOT

TAGS = ("parameters", "cases", "measure")


def load_cells(name, **parameters):
    """Return the names that the cells tagged parameters, cases and measure of notebooks/NAME.ipynb
    define, and as `namespace` their globals, with `parameters` in place of the defaults; no sweep
    runs."""
    return _run(name, parameters, only=TAGS)


def run_cells(name, added=None, **parameters):
    """Return what all cells of notebooks/NAME.ipynb define, its sweeps run. `added` is a reader's
    own code, by the id of the cell that it runs behind."""
    return _run(name, parameters, added=added)


def flat(tasks):
    """Return the keys of all tasks."""
    return list(itertools.chain.from_iterable(tasks))


def published(table):
    """Return the keys of the committed rows of `table`, as it stores them; there are some."""
    found = set(map(table.identify, committed.measured(table.section.name)))
    assert found
    return found


def rows_of_two_ranks(table, tasks, measure, **options):
    """Return the rows of `table` after a sweep over `tasks` by two ranks of the CPU."""
    run = Run(table.section.name, {}, {}, "cpu", "cpu")
    assert sweep(table, tasks, measure, run, ranks=2, device="cpu", **options) == 0
    return read_section(table.section.name)["cpu"]


def fits(row, section):
    """Return whether a row has exactly the key columns of a section, and values that it has."""
    return set(row) - {*section.values, *COMMON} == set(section.key)


def identities(table, tasks):
    """Return the keys of `tasks` as `table` stores them: each has the key columns and no other, and
    none is asked for twice."""
    asked = set()
    for key in flat(tasks):
        assert set(key) == set(table.key)
        identity = table.identify(key)
        assert identity not in asked
        asked.add(identity)
    return asked


def _run(name, parameters, only=(), added=None):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] == "code" and (not only or set(tags) & set(only)):
            code = compile("".join(cell["source"]), f"{name}.ipynb[{number}]", "exec")
            exec(code, namespace)
        if "parameters" in tags:
            unknown = parameters.keys() - namespace.keys()
            assert not unknown, f"{name} has no parameter {unknown}"
            namespace.update(parameters)
        if added and cell["id"] in added:
            exec(added[cell["id"]], namespace)
    return SimpleNamespace(**namespace, namespace=namespace)

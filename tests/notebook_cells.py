"""The cells of a notebook that hold its experiment, run without its sweeps."""

import json
from types import SimpleNamespace

from a2lib.paths import ROOT

TAGS = ("parameters", "cases", "measure")


def load_cells(name, **parameters):
    """Return the names that the cells tagged parameters, cases and measure of notebooks/NAME.ipynb
    define, with `parameters` in place of the defaults; no sweep runs."""
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] == "code" and set(tags) & set(TAGS):
            code = compile("".join(cell["source"]), f"{name}.ipynb[{number}]", "exec")
            exec(code, namespace)
        if "parameters" in tags:
            unknown = parameters.keys() - namespace.keys()
            assert not unknown, f"{name} has no parameter {unknown}"
            namespace.update(parameters)
    return SimpleNamespace(**namespace)

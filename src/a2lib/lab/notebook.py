"""Begin a notebook's run: which device measures, and with which parameters.

    run = start("ddp", globals())      # prints the device and the versions

A sweep then records a run in runs.csv: device, versions, commit, the command that repeats it, the
parameters, and digits that stand for the code that measures (`sources.py`).
"""

from __future__ import annotations

import ast
import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass

from a2lib import paths
from a2lib.lab.device import device_kind, device_slug
from a2lib.lab.parameters import flag, whole
from a2lib.lab.runs import versions

YEAR_S = 366 * 24 * 3600


@dataclass
class Run:
    """One execution of a notebook on `device`, "cuda" or "cpu".

    `until` is when nothing more is started (`time.time()`), or infinity.
    """

    notebook: str
    namespace: Mapping[str, object]
    defaults: Mapping[str, object]
    device: str
    slug: str
    until: float = float("inf")
    remeasure: bool = False

    @property
    def parameters(self) -> dict[str, object]:
        """Return the notebook's parameters with the values that they have now."""
        return {name: self.namespace.get(name) for name in self.defaults}

    @property
    def command(self) -> str:
        """Return the command that repeats this run: the parameters that differ from the default."""
        words = []
        for name, value in self.parameters.items():
            if value != self.defaults[name] and name != "time_limit_s":
                words += ["-p", name, shlex.quote(str(value))]
        return " ".join(["papermill", f"notebooks/{self.notebook}.ipynb", *words])


def start(notebook: str, namespace: Mapping[str, object]) -> Run:
    """Return the run of a notebook, and print on what it runs.

    Arguments:

    - `notebook` is a name in notebooks/, without its ending.
    - `namespace` is `globals()` of the notebook. Its parameters are the names in the cell tagged
      `parameters`; `time_limit_s` and `remeasure`, which every notebook has, are read here.

    Raises ParameterError for a wrong value of these two.
    """
    defaults = declared_parameters(notebook, namespace)
    limit_s = whole("time_limit_s", namespace.get("time_limit_s", 0), 0, YEAR_S)
    device = device_kind()
    run = Run(
        notebook,
        namespace,
        defaults,
        device,
        device_slug(),
        until=time.time() + limit_s if limit_s else float("inf"),
        remeasure=flag("remeasure", namespace.get("remeasure", False)),
    )
    print(_device_name(device))
    for name, version in versions().items():
        if version:
            print(f"  {name:8}{version}")
    print(f"  command {run.command}")
    return run


def declared_parameters(notebook: str, namespace: Mapping[str, object]) -> dict[str, object]:
    """Return name -> default of the cell tagged `parameters` of a notebook in notebooks/; for any
    other notebook the annotated names of `namespace`, whose defaults are not known."""
    path = paths.ROOT / "notebooks" / f"{notebook}.ipynb"
    if not path.is_file():
        annotated = namespace.get("__annotations__", {})
        return dict.fromkeys(annotated)
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            return _assigned("".join(cell["source"]))
    return {}


def _assigned(code: str) -> dict[str, object]:
    defaults = {}
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.AnnAssign):
            defaults[statement.target.id] = ast.literal_eval(statement.value)
        elif isinstance(statement, ast.Assign):
            defaults[statement.targets[0].id] = ast.literal_eval(statement.value)
    return defaults


def _device_name(device: str) -> str:
    if device == "cpu":
        return "CPU: its times say nothing about a GPU"
    import torch

    return torch.cuda.get_device_name()

"""Run one notebook of this repository through papermill: `make flash SEQ_LEN=65536` ends here.

    python dev/run_notebook.py flash SEQ_LEN=65536 HEAD_DIMS=[64,128]

A parameter's name is that of the notebook in capitals; the notebook itself refuses what it does
not know. Rows go where a direct run puts them ($A2LIB_DATA, else data/, on a CPU build/data/), the
executed copy goes to build/runs/. This process becomes papermill, so that a signal to it is one to
papermill; `a2lib.papermill_default` does the rest.
"""

import os
import sys
from pathlib import Path

import yaml

from a2lib.paths import ROOT


def papermill_options(settings: list[str]) -> list[str]:
    """papermill's options for settings `NAME=value`; a value in brackets is read as a YAML list."""
    options = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        name = name.rstrip(":").lower()
        if not equals or not name.isidentifier():
            raise SystemExit(f"run_notebook: '{setting}' is not of the form NAME=value")
        if value.startswith(("[", "{")):
            text = f"{{{name}: {value}}}"
            try:
                yaml.safe_load(text)
            except yaml.YAMLError:
                raise SystemExit(f"run_notebook: '{setting}' is no list in YAML") from None
            options += ["-y", text]
        else:
            options += ["-p", name, value]
    return options


def main(args: list[str]) -> None:
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    if not args or args[0] not in names:
        raise SystemExit(f"run_notebook: name one of these notebooks: {', '.join(names)}")
    papermill = Path(sys.executable).with_name("papermill")
    notebook = os.path.relpath(ROOT / "notebooks" / f"{args[0]}.ipynb")
    command = [papermill, notebook, *papermill_options(args[1:])]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.flush()
    os.execv(papermill, [str(word) for word in command])


if __name__ == "__main__":
    main(sys.argv[1:])

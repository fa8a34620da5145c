"""Run one notebook of this repository through papermill: `make flash SEQ_LEN=65536` ends here.

    python dev/run_notebook.py flash SEQ_LEN=65536 HEAD_DIMS=[64,128]

A parameter's name is that of the notebook in capitals; the notebook itself refuses what it does
not know. Rows go where a direct run puts them ($A2LIB_DATA, else data/, on a CPU build/data/), the
executed copy goes to build/runs/. What its last cell printed, where the rows are, is shown.
"""

import subprocess
import sys
from pathlib import Path

from a2lib.papermill_default import modified, say_last_words
from a2lib.paths import ROOT, runs_dir


def papermill_options(settings: list[str]) -> list[str]:
    """papermill's options for settings `NAME=value`; a value in brackets is read as a YAML list."""
    options = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        name = name.rstrip(":").lower()
        if not equals or not name.isidentifier():
            raise SystemExit(f"run_notebook: '{setting}' is not of the form NAME=value")
        if value.startswith(("[", "{")):
            options += ["-y", f"{{{name}: {value}}}"]
        else:
            options += ["-p", name, value]
    return options


def main(args: list[str]) -> int:
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    if not args or args[0] not in names:
        raise SystemExit(f"run_notebook: name one of these notebooks: {', '.join(names)}")
    source = ROOT / "notebooks" / f"{args[0]}.ipynb"
    output = runs_dir() / source.name
    output.parent.mkdir(parents=True, exist_ok=True)
    papermill = Path(sys.executable).with_name("papermill")
    command = [papermill, source, output, *papermill_options(args[1:])]
    before = modified(output)
    code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    if modified(output) != before:
        say_last_words(output)
        print(f"the executed notebook is in {output.relative_to(ROOT)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Lets `papermill notebooks/flash.ipynb -p seq_len 65536` work as it stands, with no output path.

papermill 2.7 alone refuses that line in a terminal, and where its standard input is a pipe it reads
the pipe as the notebook and takes the named file as the place to *write*. This module, which
papermill imports as a `papermill.io` entry point before it reads its command line, adds the missing
path `build/runs/<name>.ipynb`. It does so only where the one path given is a notebook in this
repository's `notebooks/`; every other use of papermill is left alone, and so is
`papermill notebooks/flash.ipynb -`, which writes the executed notebook to standard output.

A name on that line that is no parameter of the notebook is refused before a kernel starts. When the
notebook has run, its tables are shown in the terminal.

A run of such a notebook also ends well: SIGTERM and SIGHUP end it as Ctrl-C does, kernel and all,
an interrupted run says what is kept, an error that the notebook tells in one line is shown as that
line, and a run that `make` started ends when make is gone. `A2LIB_PAPERMILL_DEFAULT=0` switches all
of it off; `quiet`, which `make` sets, leaves out the line about the missing path and this prefix.
"""

import ast
import atexit
import base64
import json
import keyword
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from a2lib.errors import unknown_parameter
from a2lib.paths import ROOT, data_dir, runs_dir

SWITCH = "A2LIB_PAPERMILL_DEFAULT"
# The process that this one is to end with.
PARENT = "A2LIB_PARENT"
PARENT_POLL_S = 0.5
SHOWN_LINES = 24  # of a table in the terminal
_stopped: list[int] = []  # the signals that stopped this process

# How many values each option of papermill takes. papermill's own table cannot be asked: it does not
# exist yet when this module is imported. An option that is not here makes us leave the line alone.
OPTION_VALUES = {
    **dict.fromkeys(("-p", "--parameters", "-r", "--parameters_raw"), 2),
    **dict.fromkeys(("-f", "--parameters_file", "-y", "--parameters_yaml"), 1),
    **dict.fromkeys(("-b", "--parameters_base64", "-k", "--kernel", "-l", "--language"), 1),
    **dict.fromkeys(("--engine", "--autosave-cell-every", "--cwd", "--log-level"), 1),
    **dict.fromkeys(("--stdout-file", "--stderr-file", "--execution-timeout"), 1),
    **dict.fromkeys(("--start-timeout", "--start_timeout"), 1),
    **dict.fromkeys(("--inject-input-path", "--inject-output-path", "--inject-paths"), 0),
    **dict.fromkeys(("--request-save-on-cell-execute", "--no-request-save-on-cell-execute"), 0),
    **dict.fromkeys(("--prepare-only", "--prepare-execute"), 0),
    **dict.fromkeys(("--progress-bar", "--no-progress-bar"), 0),
    **dict.fromkeys(("--log-output", "--no-log-output"), 0),
    **dict.fromkeys(("--report-mode", "--no-report-mode"), 0),
}
# With one of these papermill runs nothing, so there is nothing to write.
INFORMATION = ("-h", "--help", "--help-notebook", "--version")


def positionals(args: list[str]) -> list[str] | None:
    """Positional arguments of a papermill command line, or None where it is not ours to judge."""
    taken_apart = _take_apart(args)
    return taken_apart and taken_apart[0]


def _take_apart(args: list[str]) -> tuple[list[str], list[tuple[str, str]]] | None:
    """Positional arguments of a papermill command line; each option that has values, with the
    first. None where it is not ours to judge.

    `args` is the line without the program's name. None means: it asks for information, an option is
    unknown, or an option lacks its values, which papermill itself reports better.
    """
    found: list[str] = []
    options: list[tuple[str, str]] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return found + rest, options
        if word == "-" or not word.startswith("-"):
            found.append(word)
            continue
        if word in INFORMATION:
            return None
        name, values = word, OPTION_VALUES.get(word)
        if values is None:  # the first may be attached: --cwd=here, -pseq_len 128, -k=python3
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            values = OPTION_VALUES.get(name, 0)
            if not values:
                return None
            rest.insert(0, word.removeprefix(name).removeprefix("="))
        if values > len(rest):
            return None
        if values:
            options.append((name, rest[0]))
        del rest[:values]
    return found, options


def given_names(args: list[str]) -> list[object]:
    """The names of the parameters on a papermill command line, which papermill writes into the
    notebook as code. What it cannot read, it reports itself; a file that is not here is left out.
    """
    import yaml

    names: list[object] = []
    for option, value in _take_apart(args)[1]:
        if option in ("-p", "--parameters", "-r", "--parameters_raw"):
            names.append(value)
        try:
            if option in ("-b", "--parameters_base64"):
                value = base64.b64decode(value).decode()
            elif option in ("-f", "--parameters_file"):
                value = Path(value).read_text(encoding="utf-8")
            elif option not in ("-y", "--parameters_yaml"):
                continue
            names += dict(yaml.safe_load(value) or ())
        except (OSError, ValueError, TypeError, yaml.YAMLError):
            continue
    return names


def declared_names(notebook: Path) -> list[str]:
    """The parameters that a notebook declares in its tagged cell; [] where it has none."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        tagged = [c for c in cells if "parameters" in c["metadata"].get("tags", ())]
        body = ast.parse("".join(tagged[0]["source"])).body
    except (OSError, ValueError, LookupError, TypeError, SyntaxError):
        return []
    targets = []
    for node in body:
        targets += node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def refuse_unknown(args: list[str]) -> None:
    """End this process with one line, before a kernel starts, for a name that is no parameter of
    the notebook, or that is none at all: papermill would run it."""
    declared = declared_names(Path(positionals(args)[0]))
    for name in given_names(args):
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            shown = repr(name) if len(repr(name)) <= 60 else f"{repr(name)[:60]}..."
            allowed = f"; allowed are {', '.join(declared)}" if declared else ""
            raise SystemExit(f"ParameterError: {shown} is no name of a parameter{allowed}")
        if declared and name not in declared:
            raise SystemExit(f"ParameterError: {unknown_parameter(name, declared)}")


def is_ours(args: list[str]) -> bool:
    """Whether a papermill command line, less the program's name, runs one of our notebooks."""
    paths = positionals(args)
    if not paths:
        return False
    notebook = Path(paths[0])
    if notebook.suffix != ".ipynb" or not notebook.is_file():
        return False
    return notebook.resolve().parent == (ROOT / "notebooks").resolve()


def default_output(args: list[str]) -> Path | None:
    """Path to add to a papermill command line, or None where it needs none or is not about us.

    `args` is the line without the program's name.
    """
    paths = positionals(args)
    if not is_ours(args) or len(paths) != 1:
        return None
    return runs_dir() / Path(paths[0]).name


def is_papermill_command() -> bool:
    """Whether this process is the `papermill` command, not some program that imports papermill."""
    name = os.path.basename(sys.argv[0] if sys.argv else "")
    if name == "-m":  # `python -m papermill`: argv[0] names the package only once it is imported
        return "papermill" in sys.orig_argv or "-mpapermill" in sys.orig_argv
    return name in ("papermill", "papermill.exe")


def _is_quiet() -> bool:
    return os.environ.get(SWITCH, "").lower() == "quiet"


def _say(message: str) -> None:
    if sys.stderr is not None:
        # Whoever typed `make flash` does not know this module.
        print(message if _is_quiet() else f"a2lib: {message}", file=sys.stderr, flush=True)


def modified(path: Path) -> int | None:
    """When `path` was last written, in ns; None where there is no such file."""
    return path.stat().st_mtime_ns if path.exists() else None


def results(path: Path) -> str:
    """The tables of the executed notebook at `path` as text, and what its last code cell printed.

    papermill shows neither; a notebook ends by saying where its rows are. Of a long table only the
    first lines. "" where there is nothing of the kind, or no such notebook.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
        said = []
        for data in (output.get("data", {}) for of_cell in outputs for output in of_cell):
            if "text/html" in data:
                lines = "".join(data["text/plain"]).splitlines()
                more = len(lines) - SHOWN_LINES
                rest = [f"... {more} more lines in the notebook"] if more > 0 else []
                said.append("\n".join([*lines[:SHOWN_LINES], *rest]))
        said += [
            "".join(output["text"])
            for output in outputs[-1]
            if output["output_type"] == "stream" and output["name"] == "stdout"
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    return "\n\n".join(part.strip() for part in said)


def say_results(path: Path) -> None:
    """Print `results` on standard error, if there are any."""
    # The notebook, which may be published, names no folder of this machine.
    said = results(path).replace("$A2LIB_DATA/", f"{data_dir()}/")
    if said and sys.stderr is not None:
        print(said, file=sys.stderr, flush=True)


def leave_out_empty(path: Path) -> None:
    """Take the sections that have nothing to show, and say so, out of the executed notebook at
    `path`; a line names them. `experiments/harness/output.py` marks what they say."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        sections: list[list[dict]] = [[]]
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown" and "".join(cell["source"]).startswith("## "):
                sections.append([])
            sections[-1].append(cell)
        empty = [cells for cells in sections if _shows_nothing(cells)]
        if not empty:
            return
        names = ["".join(cells[0]["source"]).splitlines()[0].lstrip("# ") for cells in empty]
        line = {"cell_type": "markdown", "id": "left-out", "metadata": {}}
        line["source"] = f"Not measured in this run: {'; '.join(names)}."
        kept = [cells for cells in sections if cells not in empty]
        kept.insert(-1, [line])
        notebook["cells"] = [cell for cells in kept for cell in cells]
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return


def _shows_nothing(cells: list[dict]) -> bool:
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return bool(outputs) and all(
        output.get("metadata", {}).get("a2lib") == "nothing" for output in outputs
    )


def _say_where(path: Path, shown: str, before: int | None) -> None:
    if modified(path) != before:
        leave_out_empty(path)
        say_results(path)
        _say(f"the executed notebook is in {shown}")


def add_default_output() -> None:
    """Add the output path to this process's command line where one is missing."""
    output = default_output(sys.argv[1:])
    if output is None:
        return
    try:
        os.fstat(0)
    except OSError:
        # papermill asks what standard input is, and fails where it was closed (cron, `<&-`).
        os.open(os.devnull, os.O_RDONLY)
    shown = os.path.relpath(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"a2lib: cannot make the folder of {shown}: {error.strerror}") from None
    if not _is_quiet():
        _say(
            f"no output path given; the executed notebook goes to {shown} ({SWITCH}=0: ask for one)"
        )
    sys.argv.append(shown)
    atexit.register(_say_where, output, shown, modified(output))


def end_well() -> None:
    """Let this process end its kernel and say what is kept, whatever ends it."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # Ignored on purpose where it is: nohup, or a shell's background job.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    atexit.register(_say_what_is_kept)
    sys.excepthook = _show_one_line
    parent = os.environ.pop(PARENT, "")
    if parent.isdigit():
        threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()


def _interrupt(number: int, frame: object) -> None:
    # Ending twice would end the clean-up. A second Ctrl-C is for who does not want to wait for it.
    for other in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(other, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _stopped.append(number)
    raise KeyboardInterrupt


def _say_what_is_kept() -> None:
    # Last, since the kernel may show a traceback when it is ended.
    if _stopped:
        _say(
            "stopped; every row measured so far is stored. The same command again goes on with a"
            " sweep, and measures a single shape again"
        )


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _show_one_line(kind: type, error: BaseException, trace: object) -> None:
    """An exception hook: papermill's own traceback says nothing about an error in a notebook."""
    lines = getattr(error, "traceback", None)
    name, value = getattr(error, "ename", ""), getattr(error, "evalue", "")
    if lines and [str(line) for line in lines] == [f"{name}: {value}"]:
        print(f"{name}: {value}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(kind, error, trace)


def prepare() -> None:
    """What this module is for, where this process runs one of our notebooks."""
    if os.environ.get(SWITCH, "").lower() in ("0", "off", "no", "false"):
        return
    if is_papermill_command() and is_ours(sys.argv[1:]):
        refuse_unknown(sys.argv[1:])
        end_well()
        add_default_output()


# papermill wants a handler from its entry point, and never calls it: no path has that prefix.
no_handler = None

prepare()

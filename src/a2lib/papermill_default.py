"""Lets `papermill notebooks/flash.ipynb -p seq_len 65536` work as it stands, with no output path.

papermill 2.7 alone refuses that line in a terminal, and where its standard input is a pipe it reads
the pipe as the notebook and takes the named file as the place to *write*. This module, which
papermill imports as a `papermill.io` entry point before it reads its command line, adds the missing
path `build/runs/<name>.ipynb`. It does so only where the notebook is one of this repository's
`notebooks/`; every other use of papermill is left alone, and so is
`papermill notebooks/flash.ipynb -`, which writes the executed notebook to standard output. When the
notebook has run, its tables are shown in the terminal.

A name that is no parameter of the notebook is refused before a kernel starts. SIGTERM and SIGHUP
end a run as Ctrl-C does, kernel and all, an interrupted run says what is kept, and an error that
the notebook tells in one line is shown as that line.
"""

import atexit
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from a2lib.errors import none_of
from a2lib.paths import ROOT, TERMINAL, runs_dir

SHOWN_LINES = 24  # of a table in the terminal
OTHERS = "; shown are "  # what a cell prints before rows that nobody asked for, as Table.shown does
_stopped: list[int] = []  # the signals that stopped this process
_terminal: list[int] = []  # where this process can still write behind a stop
_main = click.Command.main


def main(command: click.Command, args: list[str] | None = None, *more: object, **options: object):
    """Run a command as click asks: prepare papermill's, for a notebook of ours."""
    if command.name == "papermill":
        args = list(sys.argv[1:] if args is None else args)
        paths = positionals(command, args)
        if len(paths) == 2:
            refuse_overwriting(*map(Path, paths))
        if paths and is_ours(Path(paths[0])):
            output = None
            if len(paths) == 1:
                output = Path(os.path.relpath(runs_dir() / Path(paths[0]).name))
                args.append(str(output))
            return run(lambda: _main(command, args, *more, **options), Path(paths[0]), output)
    return _main(command, args, *more, **options)


click.Command.main = main


def positionals(command: click.Command, args: list[str]) -> list[str]:
    """Return the notebook and the output of a papermill command line; [] where papermill has to
    speak: the line asks for information, or is wrong."""
    try:
        values, beyond, _ = command.make_parser(click.Context(command)).parse_args(list(args))
    except click.UsageError:
        return []
    if beyond or {"help", "help_notebook", "version"} & values.keys():
        return []
    paths = [values["notebook_path"], values["output_path"]]
    return [path for path in paths if isinstance(path, str)]


def refuse_overwriting(notebook: Path, output: Path) -> None:
    """End this process with one line where the output is another of this repository's notebooks:
    `papermill notebooks/f*.ipynb` would write over a record."""
    if is_ours(output) and output.resolve() != notebook.resolve():
        raise SystemExit(f"{output} is a notebook itself, and would be written over: name one file")


def is_ours(notebook: Path) -> bool:
    """Return whether a file is one of this repository's notebooks."""
    is_notebook = notebook.suffix == ".ipynb" and notebook.is_file()
    return is_notebook and notebook.resolve().parent == (ROOT / "notebooks").resolve()


def run(papermill: Callable[[], object], notebook: Path, output: Path | None) -> object:
    """Call ``papermill``, which executes ``notebook`` and ends this process, and end well."""
    from papermill import cli, inspect_notebook

    execute, declared = cli.execute_notebook, list(inspect_notebook(notebook))
    before, is_run = modified(output), False

    def checked(*arguments, parameters, prepare_only=False, **settings):
        nonlocal is_run
        refuse_unknown(parameters, declared)
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
        is_run = not prepare_only
        return execute(*arguments, parameters=parameters, prepare_only=prepare_only, **settings)

    cli.execute_notebook = checked
    encrypt()
    heed_signals()
    try:
        return papermill()
    except Exception as error:
        if _stopped:  # what the interrupted cell raised
            raise SystemExit(128 + _stopped[-1]) from None
        line = one_line(error)
        if line is None:
            raise
        raise SystemExit(line) from None
    finally:
        cli.execute_notebook = execute
        if is_run and modified(output) != before:
            with contextlib.suppress(OSError, ValueError):  # cut off while it was written
                say(results(json.loads(output.read_text(encoding="utf-8"))))
            say(f"the executed notebook is in {output}")


def encrypt() -> None:
    """Have Jupyter encrypt what it sends to the kernel, where it can: else each run warns that it
    does not."""
    import zmq
    from jupyter_client.manager import KernelManager

    policy = KernelManager.class_traits().get("transport_encryption")
    if policy is not None and zmq.has("curve"):
        policy.default_value = "auto"


def refuse_unknown(names: Iterable[object], declared: list[str]) -> None:
    """End this process with one line for a name that is none of the ``declared`` parameters:
    papermill would write it into the notebook, as code."""
    for name in names:
        if name not in (*declared, "PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"):
            raise SystemExit(f"ParameterError: unknown parameter {none_of(declared, name)}")


def one_line(error: Exception) -> str | None:
    """Return the line in which a notebook tells an error, or for a file that cannot be written;
    None for any other, which has a traceback."""
    if isinstance(error, OSError):
        if error.strerror is None:  # papermill's own, of a folder that is not there
            return str(error)
        return f"{error.filename or 'the executed notebook or a file of Jupyter'}: {error.strerror}"
    line = f"{getattr(error, 'ename', '')}: {getattr(error, 'evalue', '')}"
    return line if list(getattr(error, "traceback", ())) == [line] else None


def heed_signals() -> None:
    """Let this process end its kernel and say what is kept, whatever ends it."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # Ignored on purpose where it is: nohup, or a shell's background job.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    atexit.register(_say_what_is_kept)
    if sys.stderr is not None and sys.stderr.isatty():
        # Where a sweep shows how far it is.
        os.environ.setdefault(TERMINAL, os.ttyname(sys.stderr.fileno()))
        keep_for_this_process()


def keep_for_this_process() -> None:
    """Keep the terminal from the kernel, which tells dozens of lines when it is interrupted."""
    _terminal.append(os.dup(sys.stderr.fileno()))
    shown = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    _silence(sys.stderr.fileno())
    sys.stderr = shown


def _silence(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def _interrupt(number: int, frame: object) -> None:
    # Ending twice would end the clean-up. A second Ctrl-C is for who does not want to wait for it.
    for other in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(other, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _stopped.append(number)
    if _terminal:  # what asyncio and click say of it is not for the reader
        _silence(sys.stderr.fileno())
    raise KeyboardInterrupt


def _say_what_is_kept() -> None:
    if _stopped:
        say(
            "stopped; every row measured so far is stored. The same command again goes on with a"
            " sweep, and measures a single shape again"
        )


def say(message: str) -> None:
    """Print a message that is not empty on standard error, if there is one."""
    if message and _terminal and _stopped:
        os.write(_terminal[0], f"{message}\n".encode())
    elif message and sys.stderr is not None:
        print(message, file=sys.stderr, flush=True)


def modified(path: Path | None) -> int | None:
    """When `path` was last written, in ns; None where there is no such file."""
    return path.stat().st_mtime_ns if path and path.exists() else None


def results(notebook: dict) -> str:
    """Return the tables of an executed notebook as text, and what its last code cell printed:
    papermill shows neither, and a notebook ends by saying where its rows are. Of a long table only
    the first lines; of rows that this run did not ask for none."""
    said = []
    last = ""
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        last = printed(cell["outputs"])
        if OTHERS in last:
            continue
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "text/html" in data:
                said.append(cut("".join(data["text/plain"])))
    return "\n\n".join(part.strip() for part in [*said, last])


def cut(text: str) -> str:
    """Return the first lines of a table, and how many more there are."""
    lines = text.splitlines()
    more = len(lines) - SHOWN_LINES
    if more > 0:
        lines[SHOWN_LINES:] = [f"... {more} more lines in the notebook"]
    return "\n".join(lines)


def printed(outputs: list[dict]) -> str:
    """Return what a cell of these outputs printed."""
    text = ""
    for output in outputs:
        if output.get("name") == "stdout":
            text += "".join(output["text"])
    return text


# papermill wants a handler from its entry point, and never calls it: no path has that prefix.
no_handler = None

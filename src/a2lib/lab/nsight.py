"""Run a command under Nsight Systems, and get its trace as SQLite.

    path, printed = record([sys.executable, "-m", "module"], Path("report"), timeout_s=400)
    a2lib.lab.trace.from_nsys(path)

The command marks what is traced with ``torch.cuda.profiler.start()`` and ``stop()``. The program is
the ``nsys`` on the path. Options as in NVIDIA's "User Guide" of Nsight Systems 2025, chapter "CLI
Profile Command Switches".
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from a2lib.errors import OneLine

# Sampling and context switches would take the host's time and answer nothing that is asked here.
OPTIONS = ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none")
OPTIONS += ("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true")
EXPORT_S = 300


class ProgramError(OneLine, RuntimeError):
    """A program gave no result; the message is one line and says why."""


def find() -> str | None:
    """Return the path of Nsight Systems, or None where it is not on the path."""
    return shutil.which("nsys")


def record(command: Sequence[str], report: Path, *, timeout_s: float) -> tuple[Path, str]:
    """Trace ``command``; the path of the SQLite export, and what the command printed.

    ``report`` is the file's name without its suffix; ``.nsys-rep`` and ``.sqlite`` are written.
    Raises ProgramError where there is no nsys, or no report or export comes of it.
    """
    nsys = find()
    if nsys is None:
        raise ProgramError("Nsight Systems (nsys) is not on the path")
    report = Path(report).absolute()
    trace = report.with_name(f"{report.name}.nsys-rep")
    exported = report.with_name(f"{report.name}.sqlite")
    for path in (trace, exported):
        path.unlink(missing_ok=True)
    printed = run(
        "nsys profile", [nsys, "profile", *OPTIONS, f"--output={report}", *command], timeout_s
    )
    if not trace.is_file():
        raise ProgramError(f"nsys profile left no report: {last_line(printed)}")
    export = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={exported}"]
    said = run("nsys export", [*export, str(trace)], EXPORT_S)
    if not exported.is_file():
        raise ProgramError(f"nsys export left no SQLite file: {last_line(said)}")
    return exported, printed


def run(what: str, command: Sequence[str], timeout_s: float) -> str:
    """Return what ``command`` printed on both outputs. Raises ProgramError, naming ``what``, where
    it fails, or does not end in time: then it is killed, with all that it started in its session.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ProgramError(f"{what} did not end within {timeout_s:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise ProgramError(f"{what} ended with {process.returncode}: {last_line(output)}")
    return output


def last_line(output: str) -> str:
    """Return the last line that says anything."""
    lines = output.strip().splitlines() or ["it printed nothing"]
    return lines[-1].strip()[:200]

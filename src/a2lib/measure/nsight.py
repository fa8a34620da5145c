"""Run a command under Nsight Systems, and get its trace as SQLite.

    path, printed = record([sys.executable, "-m", "module"], Path("report"))
    a2lib.measure.trace.read(path)

The command marks what is traced with ``torch.cuda.profiler.start()`` and ``stop()``. ``nsys`` is
what ``$A2LIB_NSYS`` names, else the one on the path, else one in a folder where NVIDIA installs it.
Options as in NVIDIA's "User Guide" of Nsight Systems 2025, chapter "CLI Profile Command Switches".
"""

import glob
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from a2lib.errors import OneLine

VARIABLE = "A2LIB_NSYS"
PLACES = (
    "/usr/local/cuda/bin/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "/opt/nvidia/nsight-systems/*/bin/nsys",
)
# Sampling and context switches would take the host's time and answer nothing that is asked here.
OPTIONS = ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none")
OPTIONS += ("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true")
EXPORT_S = 300


class NsightError(OneLine, RuntimeError):
    """A profiler, or what ran in one, gave no result; the message is one line and says why.
    ``stuck`` is whether the command did not end, and may still run."""

    def __init__(self, message: str, stuck: bool = False) -> None:
        super().__init__(message)
        self.stuck = stuck


def find() -> str | None:
    """The path of ``nsys``, or None where Nsight Systems is not found.

    Raises NsightError where ``$A2LIB_NSYS`` names no program.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen and shutil.which(chosen) is None:
        raise NsightError(f"${VARIABLE} is {chosen!r}, which is no program; name nsys")
    return installed(chosen or "nsys", PLACES)


def record(command: Sequence[str], report: Path, *, timeout_s: float) -> tuple[Path, str]:
    """Trace ``command``; the path of the SQLite export, and what the command printed.

    ``report`` is the file's name without its suffix; ``.nsys-rep`` and ``.sqlite`` are written.
    Raises NsightError where there is no nsys, or no report or export comes of it.
    """
    nsys = find()
    if nsys is None:
        raise NsightError(f"Nsight Systems (nsys) is not found; ${VARIABLE} can name it")
    report = Path(report).absolute()
    made, exported = (report.with_name(f"{report.name}.{kind}") for kind in ("nsys-rep", "sqlite"))
    for path in (made, exported):
        path.unlink(missing_ok=True)
    printed = run(
        "nsys profile", [nsys, "profile", *OPTIONS, f"--output={report}", *command], timeout_s
    )
    if not made.is_file():
        raise NsightError(f"nsys profile left no report: {last_line(printed)}")
    export = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={exported}"]
    said = run("nsys export", [*export, str(made)], EXPORT_S)
    if not exported.is_file():
        raise NsightError(f"nsys export left no SQLite file: {last_line(said)}")
    return exported, printed


def installed(program: str, places: Sequence[str]) -> str | None:
    """The path of a program: that on the path, else the last that matches one of ``places``."""
    found = [path for place in places for path in sorted(glob.glob(place, recursive=True))]
    runs = (path for path in reversed(found) if os.access(path, os.X_OK))
    return shutil.which(program) or next(runs, None)


def run(what: str, command: Sequence[str], timeout_s: float) -> str:
    """What ``command`` printed on both outputs. Raises NsightError, naming ``what``, where it
    fails, or does not end in time: then it is killed, with all that it started in its session."""
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
        raise NsightError(f"{what} did not end within {timeout_s:g} s", stuck=True) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise NsightError(f"{what} ended with {process.returncode}: {last_line(output)}")
    return output


def last_line(output: str) -> str:
    """The last line that says anything, an error of ncu's before others."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "==ERROR==" in line]
    return (errors or lines or ["it printed nothing"])[-1][:200]

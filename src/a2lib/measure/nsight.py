"""Run a command under Nsight Systems, and get its trace as SQLite.

    path, printed = record([sys.executable, "-m", "module"], Path("report"))
    a2lib.measure.trace.read(path)

The command marks what is traced with ``torch.cuda.profiler.start()`` and ``stop()``. ``nsys`` is
what ``$A2LIB_NSYS`` names, else the one on the path, else one in a folder where NVIDIA installs it.
Options as in NVIDIA's "User Guide" of Nsight Systems 2025, chapter "CLI Profile Command Switches".
"""

from __future__ import annotations

import glob
import os
import shutil
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
    """Nsight Systems gave no trace; the message is one line and says why. ``stuck`` is whether the
    command did not end, and may still run."""

    def __init__(self, message: str, stuck: bool = False) -> None:
        super().__init__(message)
        self.stuck = stuck


def find() -> str | None:
    """The path of ``nsys``, or None where Nsight Systems is not found.

    Raises NsightError where ``$A2LIB_NSYS`` names no program.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise NsightError(f"${VARIABLE} is {chosen!r}, which is no program; name nsys")
        return found
    found = shutil.which("nsys")
    if found:
        return found
    places = [path for place in PLACES for path in sorted(glob.glob(place))]
    return next((path for path in reversed(places) if os.access(path, os.X_OK)), None)


def record(command: Sequence[str], report: Path, *, timeout_s: float) -> tuple[Path, str]:
    """Trace ``command``; the path of the SQLite export, and what the command printed.

    ``report`` is the file's name without its suffix; ``.nsys-rep`` and ``.sqlite`` are written.
    What nsys starts stays in the caller's process group. Raises NsightError where there is no nsys,
    or no report or export comes of it.
    """
    nsys = find()
    if nsys is None:
        raise NsightError(f"Nsight Systems (nsys) is not found; ${VARIABLE} can name it")
    report = Path(report).absolute()
    made, exported = report.with_name(f"{report.name}.nsys-rep"), _sqlite(report)
    for path in (made, exported):
        path.unlink(missing_ok=True)
    printed = _run([nsys, "profile", *OPTIONS, f"--output={report}", *command], timeout_s)
    if not made.is_file():
        raise NsightError(f"nsys profile left no report: {_last(printed)}")
    export = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={exported}"]
    said = _run([*export, str(made)], EXPORT_S)
    if not exported.is_file():
        raise NsightError(f"nsys export left no SQLite file: {_last(said)}")
    return exported, printed


def _sqlite(report: Path) -> Path:
    return report.with_name(f"{report.name}.sqlite")


def _run(command: Sequence[str], timeout_s: float) -> str:
    """What it printed on both outputs."""
    what = f"nsys {command[1]}"
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace")  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise NsightError(f"{what} did not end within {timeout_s:g} s", stuck=True) from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise NsightError(f"{what} ended with {process.returncode}: {_last(output)}")
    return output


def _last(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"

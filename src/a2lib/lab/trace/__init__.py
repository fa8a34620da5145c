"""What a GPU did in a step: the kernels of a trace, by class and by the range that launched them.

    trace = read("report.sqlite")            # nsys export --type sqlite report.nsys-rep
    trace = read("trace.json.gz")            # torch.profiler's export_chrome_trace, .gz or not
    kernel_rows(trace.kernels)               # calls, time, share by phase, part, class and name
    coverage(trace.kernels)                  # what could not be filed, as shares of kernel time
    busy(trace.kernels)                      # from first to last, and how long one of them ran
    phase_times(trace)["step 0"]["backward"] # the GPU's time, the host's, and how far it is ahead

A kernel belongs to the range in which it was *launched*, found by the launch's correlation id. When
it ran says nothing, since the host is ahead of the GPU; and backward is launched by a thread of its
own, which is inside the phase that the main thread is in. Reading needs no torch.

A chrome trace without a GPU has operators in the place of kernels: those that call no other.
"""

from pathlib import Path

from a2lib.lab.trace.chrome import read_chrome
from a2lib.lab.trace.classes import KINDS
from a2lib.lab.trace.kernels import Kernel, Trace, TraceError
from a2lib.lab.trace.nsys import read_nsys
from a2lib.lab.trace.summary import STEP, busy, coverage, kernel_rows, phase_times, strip_rows

__all__ = [
    "KINDS",
    "STEP",
    "Kernel",
    "Trace",
    "TraceError",
    "busy",
    "coverage",
    "kernel_rows",
    "phase_times",
    "read",
    "strip_rows",
]

_SQLITE = b"SQLite format 3\x00"
_REPORT = ".nsys-rep"


def read(path: str | Path) -> Trace:
    """The trace in ``path``, by what the file is: an SQLite export of Nsight Systems, or a chrome
    trace of torch.profiler. Raises TraceError for anything else, OSError where there is no file."""
    with open(path, "rb") as file:
        start = file.read(len(_SQLITE))
    if str(path).endswith(_REPORT) and start != _SQLITE:
        command = f"nsys export --type sqlite {Path(path).name}"
        raise TraceError(f"{path}: Nsight Systems' own form; allowed is what `{command}` makes")
    return read_nsys(path) if start == _SQLITE else read_chrome(path)

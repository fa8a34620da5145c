"""Run a command under Nsight Systems, and get its trace as SQLite; or under Nsight Compute, and get
what the hardware counted while kernels ran: bytes by level of memory, shares of pipelines.

    path, printed = record([sys.executable, "-m", "module"], Path("report"))
    a2lib.lab.trace.from_nsys(path)
    counted_calls([make, ...])      # of each call that ``make()`` returns: one dict per kernel

The command marks what is traced or counted with ``torch.cuda.profiler.start()`` and ``stop()``.
Both programs, ``nsys`` and ``ncu``, are those on the path. Options as in NVIDIA's "User Guide" of
Nsight Systems 2025, chapter "CLI Profile Command Switches".

Nsight Compute (``ncu``) runs the command and replays each kernel once per group of counters, so its
times are no timings: read those elsewhere. Source of the metrics' meaning: NVIDIA, Nsight Compute
documentation, "Metrics Reference".
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from a2lib.errors import OneLine

# Sampling and context switches would take the host's time and answer nothing that is asked here.
OPTIONS = ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none")
OPTIONS += ("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true")
EXPORT_S = 300
# Column of a row -> metric. L2 traffic is what the multiprocessors ask of L2, in sectors of 32
# bytes; of device memory, what L2 fetches and writes back.
METRICS = {
    "device_bytes": "dram__bytes.sum",
    "l2_bytes": "lts__t_sectors_srcunit_tex.sum",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exp_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
SECTOR_BYTES = 32
# ncu scales units by itself unless told to print base units; percentages have none. The clock is
# left as it is: counters of bytes and of cycles do not need it fixed.
NCU_OPTIONS = ("--csv", "--page", "raw", "--print-units", "base", "--print-fp")
NCU_OPTIONS += ("--metrics", ",".join(METRICS.values()), "--clock-control", "none")
NCU_OPTIONS += ("--profile-from-start", "off", "--target-processes", "all")

# The kernel of torch.cuda._sleep, which nothing else launches.
MARKER = "spin_kernel"


class ProgramError(OneLine, RuntimeError):
    """A program gave no result; the message is one line and says why."""


def find(program: str = "nsys") -> str | None:
    """Return the path of a program, or None where it is not on the path."""
    return shutil.which(program)


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


def counted(command: Sequence[str], *, timeout_s: float = 300) -> list[dict[str, object]]:
    """One dict per kernel that ``command`` ran while the profiler was on, in launch order.

    ``kernel`` is its name, ``device_bytes`` and ``l2_bytes`` are bytes moved, the others shares of
    the peak in percent. Raises ProgramError where ``ncu`` is missing, fails, is refused the
    counters, counts no kernel, has not every metric or takes longer than ``timeout_s`` seconds;
    nothing it started is left running.
    """
    ncu = find("ncu")
    if ncu is None:
        raise ProgramError("Nsight Compute (ncu) is not on the path; hardware counters need it")
    output = run("ncu", [ncu, *NCU_OPTIONS, *command], timeout_s)
    lines = output.splitlines()  # the raw CSV page, which may stand amid the program's own
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ProgramError(f"ncu counted no kernel: {last_line(output)}")
    head, *rows = csv.reader(line for line in lines[start:] if line.startswith('"'))
    missing = [metric for metric in METRICS.values() if metric not in head]
    if missing:
        raise ProgramError(f"this GPU or ncu has no metric {', '.join(missing)}")
    # The line below the head holds the units, with no id.
    return [_kernel(dict(zip(head, row, strict=True))) for row in rows if row[0]]


def counted_calls(
    makers: Sequence[Callable[[], Callable[[], object]]], *, timeout_s: float = 300
) -> list[list[dict[str, object]]]:
    """Return the kernels of each call that one of ``makers`` returns, as ``counted`` has them.

    The makers go to one process by value, which makes the calls in turn, each behind a marker. A
    call that fails has no kernels, and the rest go on. Raises ProgramError as ``counted``.
    """
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="a2lib-counted-") as folder:
        path = Path(folder) / "makers"
        path.write_bytes(cloudpickle.dumps(list(makers)))
        command = [sys.executable, "-m", "a2lib.lab.nsight", str(path)]
        groups = by_call(counted(command, timeout_s=timeout_s))
    if len(groups) != len(makers):
        raise ProgramError(f"{len(groups)} of {len(makers)} calls were counted")
    return groups


def by_call(kernels: Sequence[dict[str, object]]) -> list[list[dict[str, object]]]:
    """Return the kernels between one marker and the next, a list for each marker."""
    groups: list[list[dict[str, object]]] = []
    for kernel in kernels:
        if MARKER in str(kernel["kernel"]):
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def main(path: str) -> None:
    """Make and run the calls of ``counted_calls`` in this process; needs a CUDA GPU."""
    import cloudpickle
    import torch

    for make in cloudpickle.loads(Path(path).read_bytes()):
        call = None
        try:
            call = make()
        except Exception as error:
            print(f"a call is not counted: {error}", file=sys.stderr)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        if call is not None:
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        call = None
        torch.cuda.empty_cache()


def _kernel(cells: dict[str, str]) -> dict[str, object]:
    values: dict[str, object] = {"kernel": cells["Kernel Name"]}
    for column, metric in METRICS.items():
        try:
            value = float(cells[metric].replace(",", ""))
        except ValueError:
            raise ProgramError(f"ncu gave {cells[metric]!r} for {metric}") from None
        if column == "l2_bytes":
            value *= SECTOR_BYTES
        values[column] = round(value) if column.endswith("_bytes") else round(value, 2)
    return values


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
    """Return the last line that says anything, an error of ncu's before others."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "==ERROR==" in line]
    return (errors or lines or ["it printed nothing"])[-1][:200]


if __name__ == "__main__":
    main(sys.argv[1])

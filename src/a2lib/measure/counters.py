"""What the hardware counted while kernels ran: bytes by level of memory, shares of pipelines.

    counters.read([sys.executable, "-m", "module", "arguments"])   # one dict per kernel, in order

Nsight Compute (``ncu``) runs the command and replays each kernel once per group of counters, so its
times are no timings: read those elsewhere. The command marks what is counted with
``torch.cuda.profiler.start()`` and ``stop()``.

Source of the metrics' meaning: NVIDIA, Nsight Compute documentation, "Metrics Reference".
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

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
# Units that ncu scales by itself unless told to print base units; percentages have none.
_BASE = ("--print-units", "base", "--print-fp")
# Where a machine has Nsight Compute without having it on the path.
FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")


class CountersError(RuntimeError):
    """The counters could not be read; the message is one line and says why."""


def find() -> str | None:
    """The path of ``ncu``, or None where Nsight Compute is not installed."""
    found = shutil.which("ncu")
    if found:
        return found
    places = [path for folder in FOLDERS for path in sorted(Path(folder).glob("**/ncu"))]
    return next((str(path) for path in reversed(places) if os.access(path, os.X_OK)), None)


def read(command: Sequence[str], *, timeout_s: float = 300) -> list[dict[str, object]]:
    """One dict per kernel that ``command`` ran while the profiler was on, in launch order.

    ``kernel`` is its name, ``device_bytes`` and ``l2_bytes`` are bytes moved, the others shares of
    the peak in percent. Raises CountersError where ``ncu`` is missing, fails, is refused the
    counters or says nothing for ``timeout_s`` seconds; nothing it started is left running.
    """
    ncu = find()
    if ncu is None:
        raise CountersError("Nsight Compute (ncu) is not installed; hardware counters need it")
    options = ["--csv", "--page", "raw", *_BASE, "--metrics", ",".join(METRICS.values())]
    # The clock is left as it is: counters of bytes and of cycles do not need it fixed.
    options += ["--clock-control", "none", "--profile-from-start", "off"]
    options += ["--target-processes", "all"]
    process = subprocess.Popen(
        [ncu, *options, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise CountersError(f"ncu did not end within {timeout_s:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise CountersError(f"ncu ended with code {process.returncode}: {_last_words(output)}")
    return parse(output)


def parse(output: str) -> list[dict[str, object]]:
    """The kernels of ncu's raw CSV page, which may stand amid the program's own lines.

    Raises CountersError where no kernel or not every metric is there.
    """
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise CountersError(f"ncu counted no kernel: {_last_words(output)}")
    table = [line for line in lines[start:] if line.startswith('"')]
    head, *rows = csv.reader(table)
    missing = [metric for metric in METRICS.values() if metric not in head]
    if missing:
        raise CountersError(f"this GPU or ncu has no metric {', '.join(missing)}")
    # The line below the head holds the units, with no id.
    return [_kernel(dict(zip(head, row, strict=True))) for row in rows if row[0]]


def _kernel(cells: dict[str, str]) -> dict[str, object]:
    values: dict[str, object] = {"kernel": cells["Kernel Name"]}
    for column, metric in METRICS.items():
        try:
            value = float(cells[metric].replace(",", ""))
        except ValueError:
            raise CountersError(f"ncu gave {cells[metric]!r} for {metric}") from None
        if column == "l2_bytes":
            value *= SECTOR_BYTES
        values[column] = round(value) if column.endswith("_bytes") else round(value, 2)
    return values


def _last_words(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search("==ERROR==", line)]
    return (errors or lines or ["it said nothing"])[-1]

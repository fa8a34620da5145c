"""What the hardware counted while kernels ran: bytes by level of memory, shares of pipelines.

    counters.read([sys.executable, "-m", "module", "arguments"])   # one dict per kernel, in order

Nsight Compute (``ncu``) runs the command and replays each kernel once per group of counters, so its
times are no timings: read those elsewhere. The command marks what is counted with
``torch.cuda.profiler.start()`` and ``stop()``.

Source of the metrics' meaning: NVIDIA, Nsight Compute documentation, "Metrics Reference".
"""

import csv
from collections.abc import Sequence

from a2lib.measure.nsight import NsightError, installed, last_line, run

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
OPTIONS = ("--csv", "--page", "raw", "--print-units", "base", "--print-fp")
OPTIONS += ("--metrics", ",".join(METRICS.values()), "--clock-control", "none")
OPTIONS += ("--profile-from-start", "off", "--target-processes", "all")
PLACES = ("/usr/local/cuda/bin/**/ncu", "/opt/nvidia/nsight-compute/**/ncu")


def read(command: Sequence[str], *, timeout_s: float = 300) -> list[dict[str, object]]:
    """One dict per kernel that ``command`` ran while the profiler was on, in launch order.

    ``kernel`` is its name, ``device_bytes`` and ``l2_bytes`` are bytes moved, the others shares of
    the peak in percent. Raises NsightError where ``ncu`` is missing, fails, is refused the counters
    or takes longer than ``timeout_s`` seconds; nothing it started is left running.
    """
    ncu = installed("ncu", PLACES)
    if ncu is None:
        raise NsightError("Nsight Compute (ncu) is not installed; hardware counters need it")
    return parse(run("ncu", [ncu, *OPTIONS, *command], timeout_s))


def parse(output: str) -> list[dict[str, object]]:
    """The kernels of ncu's raw CSV page, which may stand amid the program's own lines.

    Raises NsightError where no kernel or not every metric is there.
    """
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise NsightError(f"ncu counted no kernel: {last_line(output)}")
    head, *rows = csv.reader(line for line in lines[start:] if line.startswith('"'))
    missing = [metric for metric in METRICS.values() if metric not in head]
    if missing:
        raise NsightError(f"this GPU or ncu has no metric {', '.join(missing)}")
    # The line below the head holds the units, with no id.
    return [_kernel(dict(zip(head, row, strict=True))) for row in rows if row[0]]


def _kernel(cells: dict[str, str]) -> dict[str, object]:
    values: dict[str, object] = {"kernel": cells["Kernel Name"]}
    for column, metric in METRICS.items():
        try:
            value = float(cells[metric].replace(",", ""))
        except ValueError:
            raise NsightError(f"ncu gave {cells[metric]!r} for {metric}") from None
        if column == "l2_bytes":
            value *= SECTOR_BYTES
        values[column] = round(value) if column.endswith("_bytes") else round(value, 2)
    return values

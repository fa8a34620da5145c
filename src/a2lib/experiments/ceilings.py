"""What the device can do at best: a large matrix product, and a copy in device memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.harness.worker import Job
from a2lib.measure.failures import classify
from a2lib.theory.products import matmul_flops

# (dtype, size): size**3 multiply-adds, far above what fills a GPU; small where a CPU does it. More
# than one size: which is best depends on the library's tiles, and a longer product runs at a lower
# clock.
MATMULS = {
    "cuda": (("bf16", 4096), ("bf16", 8192), ("bf16", 16384), ("fp32", 4096), ("fp32", 8192)),
    "cpu": (("bf16", 128), ("bf16", 256), ("fp32", 512)),
}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**24}
TIMING = {
    # A ceiling is of a burst as short as the passes it is held against: in a longer one the
    # power limit lowers the clock.
    "cuda": {"warmup_ms": 20, "rep_ms": 100, "min_n": 10, "max_n": 300},
    "cpu": {"warmup_ms": 5, "rep_ms": 50, "min_n": 1, "max_n": 50},
}


LABEL = "ceilings"


def tasks(device: str) -> list[Task]:
    """What to measure on ``device`` ("cuda" or "cpu"): a worker does all of it at once."""
    return [Task(LABEL, {}, {LABEL: tuple(keys(device))})]


def keys(device: str) -> list[dict[str, object]]:
    """The key columns of the rows, in order."""
    found = [{"operation": "matmul", "dtype": d, "size": size} for d, size in MATMULS[device]]
    return [*found, {"operation": "copy", "dtype": "bf16", "size": COPY_BYTES[device]}]


def prepare() -> None:
    """fp32 is multiplied as fp32, not as TF32."""
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False


def measure(job: Job) -> None:
    """Measure them in a worker."""
    for row in measure_ceilings(job.device):
        job.put(row)


def line(row: Mapping[str, object]) -> str:
    """One ceiling in words."""
    size = int(row["size"])
    what = f"copy of {size / 2**20:g} MiB" if row["operation"] == "copy" else f"{size}^3 matmul"
    if row["status"] != "ok":
        return f"{row['dtype']} {what}: {row['status']} ({row['note']})"
    clock = f", {row['sm_mhz']} MHz" if row["sm_mhz"] else ""
    if row["operation"] == "copy":
        rate = 2 * size / float(row["ms"]) / 1e6
        return f"{row['dtype']} {what}: {rate:.4g} GB/s, read and write{clock}"
    return f"{row['dtype']} {what}: {matmul_tflops(row):.4g} TFLOP/s{clock}"


def matmul_tflops(row: Mapping[str, object]) -> float:
    """The rate of a row of a matrix product."""
    size = int(row["size"])
    return matmul_flops(size, size, size) / float(row["ms"]) / 1e9


def measure_ceilings(device: str) -> Iterator[dict[str, object]]:
    """The rows of the ceiling section, each as soon as it is measured.

    ``size`` of a copy is the bytes read, and as many are written. A failure is a row too.
    """
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    for key in keys(device):
        size, dtype = key["size"], dtypes[key["dtype"]]
        if key["operation"] == "copy":
            yield key | _timed(lambda n=size: _copy(n, device), device)
        else:
            yield key | _timed(lambda n=size, t=dtype: _matmul(n, t, device), device)


def _matmul(n: int, dtype, device: str):
    import torch

    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    return lambda: torch.matmul(a, b, out=out)


def _copy(size: int, device: str):
    import torch

    source = torch.ones(size // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _timed(prepare, device: str) -> dict[str, object]:
    from a2lib.measure import CEILING, time_call

    try:
        timing = time_call(prepare(), device=device, **TIMING[device])
    except Exception as error:
        status, note = classify(error)
        return {"status": status, "note": note}
    return {"status": "ok", "note": ""} | timing.row(CEILING)

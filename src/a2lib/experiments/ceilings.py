"""What the device can do at best: a large matrix product, and a copy in device memory."""

from collections.abc import Mapping

from a2lib.experiments.harness import Job, Table, Task
from a2lib.lab import CEILING, time_call
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


def tasks(given: object, device: str) -> list[Task]:
    """What to measure on ``device`` ("cuda" or "cpu"): a worker does all of it at once.

    ``size`` of a copy is the bytes read, and as many are written.
    """
    found = [{"operation": "matmul", "dtype": d, "size": size} for d, size in MATMULS[device]]
    found.append({"operation": "copy", "dtype": "bf16", "size": COPY_BYTES[device]})
    return [Task.whole("ceilings", {}, found)]


def tera(row: Mapping[str, str]) -> float:
    """Of a row, 10**12 a second: operations of a product, bytes read and written of a copy."""
    size = int(row["size"])
    done = 2 * size if row["operation"] == "copy" else matmul_flops(size, size, size)
    return done / float(row["ms"]) / 1e9


CEILINGS = Table(
    CEILING,
    tasks,
    says="The device at best: TFLOP/s of products, TB/s of a copy, read and written",
    shown=("ms", "sm_mhz"),
    derived={"TFLOP/s or TB/s": tera},
    silence_s=300,
    keep_worker=True,
    always=True,
)


def prepare() -> None:
    """fp32 is multiplied as fp32, not as TF32."""
    import torch

    torch.set_float32_matmul_precision("highest")


def measure(job: Job) -> None:
    """Measure them in a worker, each a row as soon as it is there; a failure is a row too."""
    for key in job.keys:
        make = _copy if key["operation"] == "copy" else _matmul
        try:
            call = make(key["size"], key["dtype"], job.device)
            timing = time_call(call, device=job.device, **TIMING[job.device])
        except Exception as error:
            job.fail(error, [key])
        else:
            job.put({**key, "status": "ok"} | timing.row(CEILING))
        call = None


def _matmul(n: int, dtype: str, device: str):
    import torch

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    return lambda: torch.matmul(a, b, out=out)


def _copy(size: int, dtype: str, device: str):
    import torch

    source = torch.ones(size // 2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)

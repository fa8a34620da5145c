"""What the device can do at best: a large matrix product, and a copy in device memory."""

from __future__ import annotations

from collections.abc import Iterator

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


def measure_ceilings(device: str) -> Iterator[dict[str, object]]:
    """The rows of the ceiling section, each as soon as it is measured.

    fp32 is multiplied as fp32, not as TF32. ``size`` of a copy is the bytes read, and as many are
    written. A failure is a row too.
    """
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    for dtype, size in MATMULS[device]:
        key = {"operation": "matmul", "dtype": dtype, "size": size}
        yield key | _timed(lambda n=size, t=dtypes[dtype]: _matmul(n, t, device), device)
    size = COPY_BYTES[device]
    yield {"operation": "copy", "dtype": "bf16", "size": size} | _timed(
        lambda: _copy(size, device), device
    )


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
    from a2lib.experiments import peers
    from a2lib.measure import CEILING, time_call

    try:
        timing = time_call(prepare(), device=device, **TIMING[device])
    except Exception as error:
        status, note = peers.classify(error)
        return {"status": status, "note": note}
    return {"status": "ok", "note": ""} | timing.row(CEILING)

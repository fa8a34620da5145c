"""What the times of messages depend on beside what was asked for. No torch."""

from __future__ import annotations

import os

# What NCCL's times depend on.
SWITCHES = tuple(
    f"NCCL_{name}"
    for name in ("ALGO", "PROTO", "NVLS_ENABLE", "P2P_DISABLE", "SHM_DISABLE", "MIN_CTAS")
    + ("MAX_CTAS", "CUMEM_ENABLE", "GRAPH_REGISTER")
)


def conditions(device: str) -> str:
    """The processor and its cores on "cpu", NCCL's switches that are set on "cuda"."""
    if device == "cuda":
        set_ = [f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ]
        return ", ".join(set_)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.partition(":")[2] for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    return " ".join(lines[0].split()) if lines else "a processor without a name"

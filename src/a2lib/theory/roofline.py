"""The floor of a list of kernels: the least time of their FLOPs and bytes (a roofline estimate).

A kernel takes at least its FLOPs over a measured ceiling, and at least its bytes over a measured
bandwidth (the roofline of Williams, Waterman and Patterson, 2009). A measured time above the floor
of its own list is the cost of launches, caches and tiles. The difference between two lists is what
fusion can save. ``step_floor.py`` has the lists of a training step, ``eager.py`` those of attention
alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

PRECISIONS = ("fp32", "tf32", "bf16")
# The name that a2lib.benchmark gives to bf16 with weights and gradients of matmuls in 16 bits too.
NARROW = "bf16_weights"
PARTS = ("products", "attention", "elementwise", "loss", "optimizer")


@dataclass(frozen=True)
class Kernel:
    """One kernel, launched ``count`` times: the bytes that it reads and writes if each operand
    passes once, and the FLOPs of a matmul."""

    phase: str
    part: str
    name: str
    bytes: int
    flops: int = 0
    count: int = 1


@dataclass(frozen=True)
class Floor:
    """FLOPs and bytes of a group of kernels, and their least time in ms."""

    flops: int
    bytes: int
    ms: float


def floor(kernels: Iterable[Kernel], flops_per_s: float, bytes_per_s: float) -> dict[str, Floor]:
    """Return the floor of each of ``PARTS``, and of the "total".

    ``flops_per_s`` is the ceiling of matmuls in the precision of the step, ``bytes_per_s`` the
    bandwidth of device memory. Kernels run one after the other, so times add up.
    """
    sums = {name: [0, 0, 0.0] for name in (*PARTS, "total")}
    for kernel in kernels:
        ms = 1e3 * max(kernel.flops / flops_per_s, kernel.bytes / bytes_per_s)
        for name in (kernel.part, "total"):
            for i, value in enumerate((kernel.flops, kernel.bytes, ms)):
                sums[name][i] += value * kernel.count
    return {name: Floor(*values) for name, values in sums.items()}

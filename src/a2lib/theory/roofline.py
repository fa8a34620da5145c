"""The floor of a list of kernels: what each must compute and move, and the least time of that.

A kernel takes at least its operations over a measured ceiling, and at least its bytes over a
measured bandwidth (the roofline of Williams, Waterman and Patterson, 2009). The difference of a
measured time to the floor of its own list is what launches, caches and tiles cost; that of two
lists is what fusing can save. ``step_floor.py`` has the lists of a training step, ``eager.py``
those of attention alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from a2lib.theory.products import check_name

PRECISIONS = ("fp32", "tf32", "bf16")
# As a2lib.benchmark has it: bf16, with weights and gradients of products in 16 bits too.
NARROW = "bf16_weights"
PARTS = ("products", "attention", "elementwise", "loss", "optimizer")
PHASES = ("forward", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class Kernel:
    """One kernel, ``count`` times: operations of matrix products, and bytes with each operand
    passing once."""

    phase: str
    part: str
    name: str
    read: int
    written: int
    flops: int = 0
    count: int = 1


@dataclass(frozen=True)
class Floor:
    """Launches, operations and bytes of a group of kernels, and the least time in ms."""

    launches: int
    flops: int
    bytes: int
    ms: float


def floor(
    kernels: Iterable[Kernel], flops_per_s: float, bytes_per_s: float, by: str = "part"
) -> dict[str, Floor]:
    """The floor of each part (``by`` "part") or phase (``by`` "phase"), and of the "total".

    ``flops_per_s`` is the ceiling of matrix products in the precision of the step, ``bytes_per_s``
    the bandwidth of device memory. Kernels follow each other, so times add up. Raises ValueError
    for a ceiling that is not positive or another ``by``.
    """
    check_name("by", by, ("part", "phase"))
    if not (flops_per_s > 0 and bytes_per_s > 0):
        raise ValueError(f"ceilings are {flops_per_s!r} and {bytes_per_s!r}; both must be positive")
    sums = {name: [0, 0, 0, 0.0] for name in (*(PARTS if by == "part" else PHASES), "total")}
    for kernel in kernels:
        moved = kernel.read + kernel.written
        ms = 1e3 * max(kernel.flops / flops_per_s, moved / bytes_per_s)
        for name in (getattr(kernel, by), "total"):
            for i, value in enumerate((1, kernel.flops, moved, ms)):
                sums[name][i] += value * kernel.count
    return {name: Floor(*values) for name, values in sums.items()}


def hidden_ms(kernels: Iterable[Kernel], flops_per_s: float, bytes_per_s: float) -> float:
    """The floor of the step, in ms, whose optimizer runs wholly beside the backward: the two then
    take at least the backward's own floor, and their bytes over the bandwidth. Errors as
    ``floor``."""
    found = floor(kernels, flops_per_s, bytes_per_s, by="phase")
    backward, optimizer = found["backward"], found["optimizer"]
    moved = 1e3 * (backward.bytes + optimizer.bytes) / bytes_per_s
    return found["forward"].ms + found["loss"].ms + max(backward.ms, moved)

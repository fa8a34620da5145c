"""A collective costs an overhead and its bytes over a bandwidth: the model, and its fit to times.

The line t = o + s / w is the simplest of its kind (Hockney 1994; LogGP adds more terms). It is
fitted by least squares of the *relative* errors, so that a message of a microsecond weighs as much
as one of a second: that is linear in o and 1 / w.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from a2lib.checks import check_name
from a2lib.theory.collectives import all_gather_s, all_reduce_s, positive

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True)
class Line:
    """``overhead_s`` seconds per collective, and its bytes over ``bandwidth`` bytes per second."""

    overhead_s: float
    bandwidth: float

    def time_s(self, size: float) -> float:
        """Return the seconds of a collective of ``size`` bytes."""
        return self.overhead_s + size / self.bandwidth

    @property
    def half_size(self) -> float:
        """The bytes at which half of the bandwidth is reached: overhead and bytes take as long."""
        return self.overhead_s * self.bandwidth

    def residuals(self, sizes: Sequence[float], times_s: Sequence[float]) -> list[float]:
        """Return each measured time over the line's, less 1."""
        return [t / self.time_s(s) - 1 for s, t in zip(sizes, times_s, strict=True)]


def fit(sizes: Sequence[float], times_s: Sequence[float]) -> Line:
    """Return the line with the least squares of relative errors; an overhead below 0 becomes 0.

    Raises ValueError unless there are as many times as sizes, all above 0, two of the sizes
    different, and longer messages take longer.
    """
    if len(sizes) != len(times_s) or len(set(sizes)) < 2:
        raise ValueError("a line needs as many times as sizes, and two different sizes")
    for size, time_s in zip(sizes, times_s, strict=True):
        positive(size=size, time_s=time_s)
    # It is t = b s + o, b being 1 / w, with each error over its time.
    weights = 1 / np.array(times_s)
    b, o = np.polyfit(sizes, times_s, 1, w=weights)
    if o < 0:
        x = weights * sizes
        o, b = 0.0, x.sum() / (x @ x)
    if b <= 0:
        raise ValueError("longer messages do not take longer: no bandwidth can be fitted")
    return Line(float(o), float(1 / b))


def wire_share(operation: str, n: int) -> float:
    """Return the bytes that each of ``n`` ranks has to send in a ring, over those of the tensor.

    Algorithm bandwidth (bytes of the tensor over time) times this is bus bandwidth, which can be
    compared with a link (NVIDIA's nccl-tests, PERFORMANCE.md). Raises ValueError for an operation
    that is not among OPERATIONS, or fewer than two ranks.
    """
    check_name("operation", operation, OPERATIONS)
    if n < 2:
        raise ValueError(f"n is {n!r}; allowed are whole numbers from 2 on")
    if operation == "broadcast":
        return 1.0
    return all_reduce_s(1, n, 1) if operation == "all_reduce" else all_gather_s(1, n, 1)

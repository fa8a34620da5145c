"""FLOPs of a matmul, the widths of numbers, and a binary search."""

from collections.abc import Callable

from a2lib.checks import check_sizes

WIDE, NARROW, INDEX = 4, 2, 8  # bytes of fp32, of bf16, and of an index (int64)


def matmul_flops(m: int, n: int, k: int) -> int:
    """Return the FLOPs of an (m, k) by (k, n) matmul: ``2 * m * n * k``."""
    check_sizes(m=m, n=n, k=k)
    return 2 * m * n * k


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest whole number that ``fits``, or 0 where 1 does not. No number above one
    that does not fit may fit."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low

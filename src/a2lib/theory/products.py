"""FLOPs of a matmul, the widths of numbers, the checks that every formula makes, and a binary
search."""

from collections.abc import Callable, Iterable

WIDE, NARROW, INDEX = 4, 2, 8  # bytes of fp32, of bf16, and of an index (int64)


def matmul_flops(m: int, n: int, k: int) -> int:
    """Return the FLOPs of an (m, k) by (k, n) matmul: ``2 * m * n * k``."""
    check_sizes(m=m, n=n, k=k)
    return 2 * m * n * k


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; allowed are positive integers")


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


def check_name(what: str, name: object, allowed: Iterable[str]) -> None:
    """Raise ValueError for a name that is not ``allowed``; its message lists the allowed names."""
    if name not in tuple(allowed):
        raise ValueError(f"{what} {name!r}: allowed are {', '.join(allowed)}")

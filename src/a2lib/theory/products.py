"""Operations of a matrix product, the widths of numbers, the checks that every count makes, and a
search by halves."""

import bisect
from collections.abc import Callable, Iterable

WIDE, NARROW, INDEX = 4, 2, 8  # bytes of fp32, of bf16, of an id or a place (int64)


def matmul_flops(m: int, n: int, k: int) -> int:
    """Floating-point operations of an (m, k) by (k, n) matrix product: ``2 * m * n * k``."""
    check_sizes(m=m, n=n, k=k)
    return 2 * m * n * k


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; allowed are positive integers")


def largest(fits: Callable[[int], bool]) -> int:
    """The largest whole number that ``fits``, 0 where 1 does not; none above one that does not may
    fit."""
    high = 1
    while fits(high):
        high *= 2
    return bisect.bisect_left(range(high), True, high // 2 + 1, key=lambda n: not fits(n)) - 1


def check_name(what: str, name: object, allowed: Iterable[str]) -> None:
    """Raise ValueError, naming those ``allowed``, for another name."""
    if name not in tuple(allowed):
        raise ValueError(f"{what} {name!r}: allowed are {', '.join(allowed)}")

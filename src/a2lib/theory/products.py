"""Operations of a matrix product, and the checks that every count makes."""

from __future__ import annotations

from collections.abc import Iterable


def matmul_flops(m: int, n: int, k: int) -> int:
    """Floating-point operations of an (m, k) by (k, n) matrix product: ``2 * m * n * k``."""
    check_sizes(m=m, n=n, k=k)
    return 2 * m * n * k


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; allowed are positive integers")


def check_name(what: str, name: object, allowed: Iterable[str]) -> None:
    """Raise ValueError, naming those ``allowed``, for another name."""
    if name not in tuple(allowed):
        raise ValueError(f"{what} {name!r}: allowed are {', '.join(allowed)}")

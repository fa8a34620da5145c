"""Operations of a matrix product, how its tiles fill a GPU, and the check of sizes that every count
makes."""

from __future__ import annotations

from collections.abc import Iterable

# A tile's sums lie in registers in float32: the largest take half of a multiprocessor's on Hopper,
# and smaller ones than these read more for each operation than the best rate allows.
TILES = ((128, 128), (64, 256), (256, 64), (128, 192), (192, 128), (128, 256), (256, 128))


def matmul_flops(m: int, n: int, k: int) -> int:
    """Floating-point operations of an (m, k) by (k, n) matrix product: ``2 * m * n * k``."""
    check_sizes(m=m, n=n, k=k)
    return 2 * m * n * k


def busy_share(
    m: int, n: int, multiprocessors: int, tiles: Iterable[tuple[int, int]] = TILES
) -> float:
    """The largest share of a GPU that tiles of one shape keep at work for an (m, n) result.

    Each multiprocessor computes one tile at a time, so in the last turn some have none, and a tile
    at the edge may reach beyond the result. What splits a tile's sum may do better.
    """
    check_sizes(m=m, n=n, multiprocessors=multiprocessors)

    def busy(rows: int, columns: int) -> float:
        turns = -(-(-(-m // rows) * -(-n // columns)) // multiprocessors)
        return m * n / (turns * multiprocessors * rows * columns)

    return max(busy(*tile) for tile in tiles)


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; allowed are positive integers")

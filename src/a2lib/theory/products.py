"""FLOPs of a matmul, and the widths of numbers."""

from a2lib.checks import check_sizes

WIDE, NARROW, INDEX = 4, 2, 8  # bytes of fp32, of bf16, and of an index (int64)


def matmul_flops(m: int, n: int, k: int) -> int:
    """Return the FLOPs of an (m, k) by (k, n) matmul: ``2 * m * n * k``."""
    check_sizes(m=m, n=n, k=k)
    return 2 * m * n * k

"""Ceilings, made by hand in round rates."""

# 2 * 8192**3 operations at 50 and at 800 TFLOP/s, 2 * 2**30 bytes at 4 TB/s.
CEILING = [
    {"operation": "matmul", "dtype": "fp32", "size": 8192, "ms": 2 * 8192**3 / 50e9},
    {"operation": "matmul", "dtype": "bf16", "size": 8192, "ms": 2 * 8192**3 / 800e9},
    {"operation": "copy", "dtype": "bf16", "size": 2**30, "ms": 2 * 2**30 / 4e9},
]

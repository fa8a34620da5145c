"""The landing page: what an H200 is."""

import pandas as pd

from a2lib.report.metrics import ceilings, copy_bandwidth, stated
from a2lib.report.tables import Table
from a2lib.report.units import digits, quantity


def gpu_table(ceiling: pd.DataFrame, device: str) -> Table:
    """Return the table of a device's rate, bandwidth and memory, as stated and as measured."""
    lines = [
        (
            "bf16 matmuls",
            quantity(stated(device, "bf16_dense"), "TFLOP/s", 3),
            quantity(ceilings(ceiling)["bf16"], "TFLOP/s", 3),
        ),
        (
            "memory bandwidth",
            quantity(stated(device, "memory_bandwidth"), "TB/s"),
            quantity(copy_bandwidth(ceiling), "TB/s"),
        ),
        ("memory", f"{digits(stated(device, 'memory'), 3)} GB", ""),
    ]
    frame = pd.DataFrame(lines, columns=["quantity", "data sheet", "best measured here"])
    return Table(frame, "What an H200 can do", "tab-index-gpu")

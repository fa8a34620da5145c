"""The landing page: the changes of a training step one by one, and what an H200 is."""

import pandas as pd

from a2lib.report.metrics import ceilings, copy_bandwidth, stated
from a2lib.report.pages import benchmark
from a2lib.report.pages.benchmark import BF16, FAST, NARROW, PLAIN, TF32
from a2lib.report.plots import bars
from a2lib.report.style import COLOURS, chart
from a2lib.report.tables import Table
from a2lib.report.units import digits, ms, percent, quantity

MODEL = "2.7B"  # its name in the rows; the text calls it the 3.4B model
# Each configuration keeps what the one above it has, except that bf16 replaces TF32.
CHANGES = {
    "fp32": (PLAIN, False),
    "TF32": (TF32, False),
    "bf16": (BF16, False),
    "+ FlashAttention": ({**BF16, "attention": "flash"}, False),
    "+ compiled blocks": (FAST, False),
    "+ CUDA graph": (FAST, True),
    "+ 16-bit weights": (NARROW, True),
}


def step(rows: pd.DataFrame, change: str):
    """Return the row of the 3.4B model's training step at 512 tokens after one of CHANGES."""
    configuration, in_graph = CHANGES[change]
    return benchmark.step(rows, MODEL, configuration, in_graph)


@chart(height=2.7)
def ladder(figure, rows: pd.DataFrame):
    """Draw a bar for the step after each change, with its time and its MFU at the end."""
    steps = [step(rows, change) for change in CHANGES]
    words = [f"{ms(row.ms)}, MFU {percent(row.mfu)}" for row in steps]
    times = [row.ms for row in steps]
    ax = figure.subplots()
    colours = [COLOURS[0]] * len(steps)
    bars(ax, list(CHANGES), times, text=words, colours=colours, xlabel="a training step, ms")
    ax.set_xlim(0, 1.5 * max(times))
    ax.set_xticks([0, 250, 500, 750, 1000])


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

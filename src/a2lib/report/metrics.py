"""Rates that a device reaches or is stated to reach, least times by them, GPU times of rows."""

from collections.abc import Iterable

import pandas as pd

from a2lib.report.data import load_devices
from a2lib.theory.products import matmul_flops
from a2lib.theory.roofline import Floor, Kernel, floor

OURS = "a2lib"


def ceilings(ceiling: pd.DataFrame) -> dict[str, float]:
    """Return the best measured rate of matmuls for each dtype, in TFLOP/s."""
    products = ceiling[(ceiling["operation"] == "matmul") & ceiling["ms"].notna()]
    flops = products["size"].map(lambda n: matmul_flops(n, n, n))
    return (flops / products["ms"] / 1e9).groupby(products["dtype"]).max().to_dict()


def stated(device: str, quantity: str) -> float:
    """Return a quantity of a device's data sheet (data/reference/devices.csv), in the sheet's unit;
    NaN for a quantity that nobody has noted."""
    sheet = load_devices().set_index(["device", "quantity"])["value"]
    return float(sheet.get((device, quantity), float("nan")))


def stated_peak(device: str) -> float:
    """Return the data sheet's rate of bf16 matmuls, in TFLOP/s; NaN if nobody has noted it."""
    return stated(device, "bf16_dense")


def copy_bandwidth(ceiling: pd.DataFrame) -> float | None:
    """Return the best measured bandwidth of a copy in TB/s, bytes read and written together; None
    if no copy was measured."""
    copies = ceiling[(ceiling["operation"] == "copy") & ceiling["ms"].notna()]
    return (2 * copies["size"] / copies["ms"] / 1e9).max() if len(copies) else None


def floors(
    kernels: Iterable[Kernel], rates: dict[str, float], bandwidth: float | None, precision: str
) -> dict[str, Floor]:
    """Return ``theory.roofline.floor`` of kernels by measured rates (``ceilings``) and bandwidth
    (``copy_bandwidth``); {} if either was not measured in this precision."""
    rate = rates.get(precision.removesuffix("_weights"))
    if not (rate and bandwidth):
        return {}
    return floor(kernels, rate * 1e12, bandwidth * 1e12)


def moved_bytes(kernels: Iterable[Kernel]) -> int:
    """Return the bytes that kernels read and write."""
    total = 0
    for kernel in kernels:
        total += kernel.count * kernel.bytes
    return total


def bytes_between_matmuls(kernels: Iterable[Kernel]) -> int:
    """Return the bytes that all kernels except matmuls read and write."""
    return moved_bytes(kernel for kernel in kernels if not kernel.flops)


def by_graph(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the GPU time (of a CUDA graph's replay) as `ms`, without quantiles.

    A row without a replay keeps its time launched from Python, with its quantiles.
    """
    in_graph = rows["ms_graph"].notna()
    return rows.assign(
        ms=rows["ms_graph"].where(in_graph, rows["ms"]),
        ms_p20=rows["ms_p20"].where(~in_graph),
        ms_p80=rows["ms_p80"].where(~in_graph),
    )

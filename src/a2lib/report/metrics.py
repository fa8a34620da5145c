"""What a device reaches in plain operations, and the GPU's own time of a row."""

import pandas as pd

from a2lib.report.data import load_devices
from a2lib.theory.products import matmul_flops

OURS = "a2lib"


def ceilings(ceiling: pd.DataFrame) -> dict[str, float]:
    """The best matrix-multiply rate measured for each dtype, in TFLOP/s."""
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
    """The best device-copy bandwidth measured, TB/s, bytes read plus bytes written."""
    copies = ceiling[(ceiling["operation"] == "copy") & ceiling["ms"].notna()]
    return (2 * copies["size"] / copies["ms"] / 1e9).max() if len(copies) else None


def by_graph(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the GPU's own time as `ms`, without spread, wherever they have one.

    A row that was not replayed from a CUDA graph keeps its time as called.
    """
    known = rows["ms_graph"].notna()
    spread = {name: rows[name].where(~known) for name in ("ms_p20", "ms_p80")}
    return rows.assign(ms=rows["ms_graph"].where(known, rows["ms"]), **spread)

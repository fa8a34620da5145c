"""What the GPU reaches in plain operations, beside what its maker states."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.flash.rows import Flash
from a2lib.report.chapters.flash.view import EVERY_DTYPE
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.products import matmul_flops

STATED = {"bf16": "bf16_dense", "fp32": "fp32_plain"}
SPLIT = 6  # bf16 products that stand for one fp32 product in our kernels (bf16x6)


def measured(flash: Flash) -> list[tuple]:
    """(dtype, size, TFLOP/s, MHz or None) of every matrix product measured, by dtype and size."""
    rows = flash.ceiling_rows[flash.ceiling_rows["operation"] == "matmul"].dropna(subset=["ms"])
    found = [
        (r.dtype, int(r.size), matmul_flops(int(r.size), int(r.size), int(r.size)) / r.ms / 1e9,
         None if pd.isna(r.sm_mhz) else float(r.sm_mhz))
        for r in rows.itertuples(index=False)
    ]  # fmt: skip
    return sorted(found, key=lambda line: (EVERY_DTYPE.index(line[0]), line[1]))


def table(flash: Flash, caption: str, name: str) -> Table:
    """Measured matrix products and copies beside the data sheet, with the clock of each."""
    lines = []
    for dtype, size, rate, mhz in measured(flash):
        stated = flash.sheet(STATED[dtype]) if dtype in STATED else None
        lines.append([
            f"{dtype} product of {size} × {size}", f"{style.digits(rate)} TFLOP/s",
            MISSING if mhz is None else f"{mhz:.0f} MHz",
            MISSING if stated is None else f"{stated:g} TFLOP/s",
            MISSING if stated is None else f"{100 * rate / stated:.0f} %",
            _of_clock(flash, dtype, rate, mhz),
        ])  # fmt: skip
    bandwidth = metrics.copy_bandwidth(flash.ceiling_rows)
    if bandwidth:
        stated = flash.sheet("memory_bandwidth")
        lines.append([
            "device copy, read plus written", f"{style.digits(bandwidth)} TB/s", MISSING,
            f"{stated:g} TB/s", f"{100 * bandwidth / stated:.0f} %", MISSING,
        ])  # fmt: skip
    columns = ["operation", "measured", "clock", "data sheet", "share", "at that clock"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def which(flash: Flash) -> Markdown:
    """Which of the measured products is called the ceiling, and what the clock does to the rest."""
    lines = [line for line in measured(flash) if line[0] == "bf16"]
    if not lines:
        return Markdown("No matrix product is measured yet.")
    _, size, rate, mhz = max(lines, key=lambda line: line[2])
    text = ("The ceiling of a dtype is the fastest of its products"
            f"; in bf16 that of {size} × {size}, {style.digits(rate)} TFLOP/s")  # fmt: skip
    if mhz is not None:
        text += f" at {mhz:.0f} MHz"
    known = [line for line in lines if line[3] is not None]
    slow = min(known, key=lambda line: line[3], default=None)
    if mhz is not None and slow and slow[3] < mhz:
        text += (f". The larger ones do not run at that clock: that of {slow[1]} × {slow[1]} runs "
                 f"at {slow[3]:.0f} MHz and reaches {style.digits(slow[2])} TFLOP/s, "
                 f"{_of_clock(flash, *slow[:1], *slow[2:])} of what that clock allows")
    return Markdown(f"{text}.")


def _of_clock(flash: Flash, dtype: str, rate: float, mhz: float | None) -> str:
    """A bf16 rate as a share of the peak at the clock it ran at."""
    if dtype != "bf16" or mhz is None:
        return MISSING
    peak = flash.sheet("multiprocessors") * flash.sheet("tensor_bf16") * mhz / 1e6
    return f"{100 * rate / peak:.0f} %"


def sources(flash: Flash) -> Markdown:
    """Where the stated rates come from, with links, and at which clock the peak is stated."""
    per_clock = flash.sheet("multiprocessors") * flash.sheet("tensor_bf16")
    mhz = flash.sheet("bf16_dense") * 1e6 / per_clock
    links = []
    for quantity in ("bf16_dense", "exponentials", "shared_bytes", "memory_bandwidth"):
        row = flash.sheet_row(quantity)
        link = f"[{row.source}]({row.address})"
        if link not in links:
            links.append(link)
    return Markdown(
        f"The stated peaks are dense ones and hold at {mhz:.0f} MHz "
        f"({flash.sheet('multiprocessors'):g} multiprocessors, {flash.sheet('tensor_bf16'):g} bf16 "
        f"operations each in a clock). Where they were read: {listed(links)}."
    )


def fp32_bound(flash: Flash) -> Markdown:
    """What bounds our fp32 kernels: a sixth of the bf16 rate, beside the rate of plain fp32."""
    stated = flash.sheet("bf16_dense") / SPLIT
    text = (
        "Our fp32 kernels split each operand into three bf16 terms and add six products of them "
        "(Triton's `bf16x6`), so what bounds them is a sixth of the bf16 rate: "
        f"{style.digits(stated)} TFLOP/s by the data sheet"
    )
    if "bf16" in flash.ceilings:
        text += f", {style.digits(flash.ceilings['bf16'] / SPLIT)} by the measured product"
    if "fp32" not in flash.ceilings:
        return Markdown(f"{text}.")
    return Markdown(
        f"{text}. The line drawn for fp32 is a product in plain fp32 arithmetic, "
        f"{style.digits(flash.ceilings['fp32'])} TFLOP/s: it bounds eager's products, not ours."
    )

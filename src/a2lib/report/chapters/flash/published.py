"""Our figures beside those that another writeup of the assignment published, for another GPU."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style, tables
from a2lib.report.chapters.flash.rows import DTYPES, LONGEST, Flash
from a2lib.report.chapters.flash.view import PASSES
from a2lib.report.metrics import LEVEL, OURS, pick, row_of, time_of
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table

THEIRS = "triton_forward_compiled_backward"


def table(flash: Flash, caption: str, name: str, head_dim: int = 64) -> Table:
    """Published H800 times, as they were printed, beside ours, with the speed-up on each."""
    lines = []
    for dtype in DTYPES:
        for pass_, title in PASSES.items():
            for length in (1024, 16384, LONGEST):
                where = {"dtype": dtype, "head_dim": head_dim, "seq_len": length,
                         "pass_": pass_}  # fmt: skip
                eager = row_of(flash.reference, implementation="eager", **where)
                tiled = row_of(flash.reference, implementation=THEIRS, **where)
                here = [row_of(flash.handout, implementation=i, **where)
                        for i in ("eager", OURS)]  # fmt: skip
                lines.append([f"{dtype} {title}", style.tokens(length), _printed(eager),
                              _printed(tiled), _ratio(tiled.speedup_over_eager),
                              *(tables.shown(r) if r else tables.MISSING for r in here),
                              _ratio(here[0].ms / here[1].ms if all(here) else None)])
    columns = ["pass", "tokens", "H800 eager", "H800 tiled", "gain",
               f"{flash.short} eager", f"{flash.short} ours", "gain "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def gain(flash: Flash, pass_: str) -> Markdown:
    """How a pass of the published implementation compares with eager on its own machine."""
    rows = pick(flash.reference, device="H800", pass_=pass_, implementation=THEIRS)
    text = []
    for dtype in DTYPES:
        ratio = pick(rows, dtype=dtype)["speedup_over_eager"].dropna()
        text.append(
            f"in {dtype} it is slower than eager at {(ratio < 1).sum()} of {len(ratio)} "
            f"shapes (speed-up from {ratio.min():.2f} to {ratio.max():.2f})"
        )
    return Markdown(f"As published, {PASSES[pass_]}, {listed(text)}.")


def ratio(flash: Flash, implementation: str, ours: str, pass_: str = "forward") -> float | None:
    """The published time over ours at the longest sequence, one head of 64, bf16."""
    where = {"dtype": "bf16", "head_dim": 64, "seq_len": LONGEST, "pass_": pass_}
    published = time_of(flash.reference, implementation=implementation, device="H800", **where)
    here = time_of(flash.handout, implementation=ours, **where)
    return None if published is None or here is None else published / here


def forward_gap(flash: Flash) -> Markdown:
    """What the GPUs can account for of the gap between the two forwards, by eager's gap."""
    tiled, eager = ratio(flash, THEIRS, OURS), ratio(flash, "eager", "eager")
    if tiled is None or eager is None:
        return Markdown("Ours is not measured yet where the published forward is slowest.")
    sxm, pcie = (flash.sheet("memory_bandwidth") / flash.sheet("memory_bandwidth", form)
                 for form in ("H100 SXM", "H100 PCIe"))  # fmt: skip
    row = flash.sheet_row("memory_bandwidth", "H100 SXM")
    text = (
        f"At {style.tokens(LONGEST)} tokens in bf16 the published forward takes {tiled:.1f} times "
        f"as long as ours, and the published eager {eager:.2f} times as long as eager here. Eager "
        "is a matter of memory, and the H200's is faster than that of an H100 by "
        f"{sxm:.2f} (SXM form) or {pcie:.2f} (PCIe form; [{row.source}]({row.address})). Taking an "
        "H800's memory for that of an H100, which is an assumption, eager's gap is "
        f"{_between(eager, sxm, pcie)}. The section names an H800 and no form; other sections of "
        "the same document name the PCIe form."
    )
    rest = tiled / eager
    if rest > LEVEL:
        text += (
            f" Eager's gap accounts for {eager:.2f} of the forward's {tiled:.1f}; a factor of "
            f"{rest:.1f} remains, which is the code. The document does not show it. Our guess: it "
            "visits the tiles above the diagonal too, which doubles the work, and its tiles were "
            "not chosen for the GPU."
        )
    return Markdown(text)


def _between(value: float, low: float, high: float) -> str:
    if value > high:
        return "more than either bandwidth explains"
    if value > low * LEVEL:
        return "more than the first explains and less than the second"
    return "no more than the bandwidth explains"


def _printed(row) -> str:
    return f"{row.ms:.2f}" if row.status == "ok" else tables.shown(row)


def _ratio(value: float | None) -> str:
    return "–" if value is None or pd.isna(value) else f"{value:.2f}×"

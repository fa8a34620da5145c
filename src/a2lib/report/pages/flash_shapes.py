"""The atlas of attention's shapes: maps, and the FlashAttention-3 paper's shapes."""

from itertools import product

import pandas as pd

from a2lib.report import panels, plots
from a2lib.report.metrics import OURS
from a2lib.report.page import LEVEL, pick
from a2lib.report.pages.flash import FA4, LOOKS, OWN, PASSES, against
from a2lib.report.style import chart
from a2lib.report.units import count

PAPER_SHOWN = (OURS, "sdpa_cudnn", "flex", "sdpa_flash", FA4)


def ratios(rows: pd.DataFrame, dtype: str, pass_: str = "end_to_end") -> pd.DataFrame:
    """Return a2lib's GPU time over that of the fastest peer, one head: lengths by head sizes."""
    ratio = against(rows, kind="one head", dtype=dtype, pass_=pass_)
    wide = ratio.rename("ratio").reset_index()
    return wide.pivot(index="seq_len", columns="head_dim", values="ratio")


def slower(rows: pd.DataFrame, dtype: str, pass_: str) -> set:
    """Return (length, head size) where a2lib is more than 2 % slower than the fastest peer."""
    ratio = ratios(rows, dtype, pass_).stack()
    return set(ratio[ratio > LEVEL].index)


@chart(height=3.9)
def maps(figure, rows: pd.DataFrame, dtype: str):
    """Draw ``ratios`` of the three passes side by side, in percent."""
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (pass_, title) in zip(axes, PASSES.items(), strict=True):
        plots.heat(ax, ratios(rows, dtype, pass_).rename(index=count))
        ax.set(title=title, xlabel="head size")
    for ax in axes[1:]:
        ax.invert_yaxis()  # each heat() turned the axis that all share
    axes[0].set_ylabel("tokens")


def two_gpus(h100: pd.DataFrame, h200: pd.DataFrame, dtype: str, pass_: str) -> pd.Series:
    """Return a2lib's time on the H100 over that on the H200, shape by shape of one head."""
    where = {"kind": "one head", "dtype": dtype, "implementation": OURS, "pass_": pass_}
    key = ["seq_len", "head_dim"]
    times = [pick(rows, **where).set_index(key)["ms"].astype(float) for rows in (h100, h200)]
    return (times[0] / times[1]).dropna()


def paper_ratios(rows: pd.DataFrame, pass_: str) -> pd.Series:
    """Return a2lib's time over the fastest peer's at the paper's shapes, by mask, head, length."""
    ratio = against(rows, kind="paper", pass_=pass_)
    return ratio.droplevel(["dtype", "batch", "heads", "pass"]).reorder_levels(
        ["causal", "head_dim", "seq_len"]
    )


@chart(height=8.0)
def paper(figure, rows: pd.DataFrame, ceiling: float):
    """Draw TFLOP/s at the FlashAttention-3 paper's shapes: panels by pass, mask and head size; a
    dashed line at ``ceiling``, the best matmul."""
    rows = pick(rows, kind="paper", implementation=PAPER_SHOWN)
    names = LOOKS.order(rows["implementation"])
    shown = list(product(OWN, (True, False)))
    axes = figure.subplots(4, 2, sharex=True, sharey=True)
    for line, (pass_, causal) in zip(axes, shown, strict=True):
        for ax, d in zip(line, (64, 128), strict=True):
            here = pick(rows, pass_=pass_, causal=causal, head_dim=d)
            plots.lines(ax, here, "seq_len", "tflops", "implementation", LOOKS)
            plots.reference(ax, ceiling, "")
            ax.set_title(f"{pass_}, {d}, {'causal' if causal else 'no mask'}")
            panels.doubling_axis(ax)
            ax.set_ylim(bottom=0)
        line[0].set_ylabel("TFLOP/s")
    for ax in axes[-1]:
        ax.set_xlabel("tokens per sequence")
    panels.legend(figure, panels.handles(names, LOOKS), columns=5)

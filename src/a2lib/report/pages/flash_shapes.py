"""The atlas of attention's shapes: maps, and the FlashAttention-3 paper's shapes."""

import pandas as pd

from a2lib.report import plots
from a2lib.report.metrics import OURS
from a2lib.report.page import LEVEL, pick
from a2lib.report.pages.flash import FA4, HEAD_DIMS, LENGTHS, SHAPE, against, launched
from a2lib.report.style import chart
from a2lib.report.units import count


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
def maps(figure, rows: pd.DataFrame):
    """Draw a2lib's time of both passes over the fastest peer's with one head in bf16, in percent:
    in a CUDA graph, and launched from Python by the longer of two."""
    from_python = launched(rows, "bf16").reindex(index=LENGTHS, columns=HEAD_DIMS)
    tables = {"in a CUDA graph": ratios(rows, "bf16"), "launched from Python": from_python}
    _draw_maps(figure, tables)


def _draw_maps(figure, tables: dict[str, pd.DataFrame]):
    axes = figure.subplots(1, len(tables), sharey=True)
    for ax, (title, table) in zip(axes, tables.items(), strict=True):
        plots.heat(ax, table.rename(index=count))
        ax.set(title=title, xlabel="head size")
    for ax in axes[1:]:
        ax.invert_yaxis()  # each heat() turned the axis that all share
    axes[0].set_ylabel("tokens")


def two_gpus(h100: pd.DataFrame, h200: pd.DataFrame, dtype: str, pass_: str) -> pd.Series:
    """Return a2lib's time on the H100 over that on the H200, shape by shape of one head."""
    return (_own_times(h100, dtype, pass_) / _own_times(h200, dtype, pass_)).dropna()


def _own_times(rows: pd.DataFrame, dtype: str, pass_: str) -> pd.Series:
    own = pick(rows, kind="one head", dtype=dtype, implementation=OURS, pass_=pass_)
    return own.set_index(["seq_len", "head_dim"])["ms"].astype(float)


def paper_ratios(rows: pd.DataFrame, pass_: str) -> pd.Series:
    """Return a2lib's time over the fastest peer's at the paper's shapes, by mask, head, length."""
    return _by_mask(against(rows, kind="paper", pass_=pass_))


def fa4_ratios(rows: pd.DataFrame, pass_: str) -> pd.Series:
    """Return a2lib's time over FlashAttention-4's at the paper's shapes, as ``paper_ratios``."""
    here = pick(rows, kind="paper", pass_=pass_)
    times = here.pivot(index=SHAPE, columns="implementation", values="ms")
    return _by_mask((times[OURS] / times[FA4]).astype(float).dropna())


def _by_mask(ratio: pd.Series) -> pd.Series:
    names = ["causal", "head_dim", "seq_len"]
    others = ratio.index.names.difference(names)
    return ratio.droplevel(list(others)).reorder_levels(names).sort_index()


@chart(height=3.0)
def paper(figure, rows: pd.DataFrame):
    """Draw the ratios of both passes at the paper's shapes, in percent: to the fastest peer, and to
    FlashAttention-4."""
    tables = {}
    for title, ratio in (
        ("beside PyTorch's fastest", paper_ratios(rows, "end_to_end")),
        ("beside FlashAttention-4", fa4_ratios(rows, "end_to_end")),
    ):
        wide = ratio.unstack(["head_dim", "causal"]).sort_index(axis=1)
        wide.columns = wide.columns.map(_column_name)
        tables[title] = wide
    _draw_maps(figure, tables)


def _column_name(column: tuple) -> str:
    """Return "64c" for causal heads of 64, "64" for heads of 64 without a mask."""
    head_dim, causal = column
    return f"{head_dim}c" if causal else str(head_dim)

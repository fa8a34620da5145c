"""The atlas of attention's shapes: maps, and the FlashAttention-3 paper's shapes."""

import pandas as pd

from a2lib.report import plots
from a2lib.report.metrics import OURS
from a2lib.report.page import LEVEL, pick
from a2lib.report.pages.flash import FA4, HEAD_DIMS, LENGTHS, PASSES, SHAPE, against, launched
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
def maps(figure, rows: pd.DataFrame, dtype: str):
    """Draw a2lib's time over the fastest peer's with one head, in percent: the forward and both
    passes in a CUDA graph, and both passes launched from Python, where that is measured."""
    from_python = launched(rows, dtype).reindex(index=LENGTHS, columns=HEAD_DIMS)
    _draw_maps(
        figure,
        {
            "forward": ratios(rows, dtype, "forward"),
            "both passes": ratios(rows, dtype),
            "both, from Python": from_python,
        },
    )


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


def fa4_ratios(rows: pd.DataFrame, pass_: str, time: str = "ms") -> pd.Series:
    """Return a2lib's time over FlashAttention-4's at the paper's shapes, as ``paper_ratios``: of
    the GPU, or launched from Python (``steady``)."""
    times = pick(rows, kind="paper", pass_=pass_).pivot(
        index=SHAPE, columns="implementation", values=time
    )
    return _by_mask((times[OURS] / times[FA4]).astype(float).dropna())


def _by_mask(ratio: pd.Series) -> pd.Series:
    names = ["causal", "head_dim", "seq_len"]
    others = ratio.index.names.difference(names)
    return ratio.droplevel(list(others)).reorder_levels(names).sort_index()


@chart(height=3.0)
def paper(figure, rows: pd.DataFrame, ratios_of=paper_ratios):
    """Draw the ratios of the three passes at the paper's shapes side by side, in percent."""
    tables = {}
    for pass_, title in PASSES.items():
        wide = ratios_of(rows, pass_).unstack(["head_dim", "causal"]).sort_index(axis=1)
        wide.columns = wide.columns.map(_column_name)
        tables[title] = wide
    _draw_maps(figure, tables)


def _column_name(column: tuple) -> str:
    """Return "64c" for causal heads of 64, "64" for heads of 64 without a mask."""
    head_dim, causal = column
    return f"{head_dim}c" if causal else str(head_dim)

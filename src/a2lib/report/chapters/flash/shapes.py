"""The shapes that the chapter is about, and what follows from the times at one shape."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics
from a2lib.report.chapters.flash.view import VIEW
from a2lib.theory.attention import attention_flops


def handout(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the handout's sweep: batch 1, one head, causal."""
    return rows[(rows["batch"] == 1) & (rows["heads"] == 1) & rows["causal"]]


def leaderboard(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the 2025 leaderboard shape: 16 heads of 64, 16,384 tokens, causal, bf16."""
    return rows[
        (rows["batch"] == 1) & (rows["heads"] == 16) & (rows["head_dim"] == 64)
        & (rows["seq_len"] == 16384) & rows["causal"] & (rows["dtype"] == "bf16")
    ]  # fmt: skip


def paper(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the FlashAttention-3 paper's shapes: 16,384 tokens in all, hidden size 2048, bf16."""
    return rows[
        (rows["batch"] * rows["seq_len"] == 16384) & (rows["heads"] * rows["head_dim"] == 2048)
        & (rows["dtype"] == "bf16")
    ]  # fmt: skip


def with_tflops(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `tflops`, TFLOP/s as the FlashAttention papers count (useful products)."""
    flops = [
        attention_flops(int(r.batch), int(r.heads), int(r.seq_len), int(r.seq_len),
                        int(r.head_dim), bool(r.causal), r.pass_)
        for r in rows.rename(columns={"pass": "pass_"}).itertuples()
    ]  # fmt: skip
    return rows.assign(tflops=pd.Series(flops, rows.index, dtype="float64") / rows["ms"] / 1e9)


def with_speedup(rows: pd.DataFrame, over: str = "eager") -> pd.DataFrame:
    """The rows with `speedup` over another implementation at the same shape (metrics)."""
    return metrics.with_speedup(rows, VIEW, over)


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per shape and pass: who is fastest, and how ours stands (metrics.fastest)."""
    return metrics.fastest(rows, VIEW)


def tally(rows: pd.DataFrame) -> dict[str, int]:
    """How many shapes ours is ahead of every peer in, level with the best, and behind it."""
    return metrics.tally(rows, VIEW)


def slopes(rows: pd.DataFrame, column: str) -> dict[int, float]:
    """Length -> log2 of the time over that at half the length (metrics.slopes)."""
    return metrics.slopes(rows, column, VIEW.along)

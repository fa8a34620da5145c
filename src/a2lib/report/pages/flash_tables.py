"""Tables of attention's rows: by GPU time, beside FlashAttention-4."""

import pandas as pd

from a2lib.report.metrics import OURS
from a2lib.report.page import LEVEL, pick
from a2lib.report.pages import flash
from a2lib.report.pages.flash import LOOKS, OWN
from a2lib.report.tables import cells
from a2lib.report.units import count, digits


def latency(rows: pd.DataFrame, index: list[str]) -> pd.DataFrame:
    """Return GPU times to three digits, a line for each value of the ``index`` columns (``seq_len``
    is one), a column for each implementation; what is within 2 % of its line's least is bold."""
    names = LOOKS.order(rows["implementation"])
    wide = rows.pivot(index=index, columns="implementation", values="ms")[names].astype(float)
    status = rows.pivot(index=index, columns="implementation", values="status")[names]
    first = wide.le(LEVEL * wide.min(axis=1), axis=0)
    shown = wide.map(lambda v: digits(v, 3), na_action="ignore")
    shown = shown.fillna(status.replace("unsupported", "n/a"))
    shown = shown.mask(first, "**" + shown + "**")
    shown = shown.rename(columns=LOOKS.label).reset_index()
    shown["seq_len"] = shown["seq_len"].map(count)
    return shown.rename(columns={"seq_len": "tokens", "head_dim": "d"})


def beside_fa4(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a2lib's time over FlashAttention-4's with many heads, by length and mask, head size
    and pass; last the leaderboard shape. A star: of a run before ``flash.SINCE``."""
    kinds = {"paper": "", "board": " (leaderboard)"}
    many = pick(rows, kind=list(kinds), pass_=OWN)
    fa4 = pick(many, implementation=flash.FA4)[[*flash.SHAPE, "ms", "run"]]
    both = pick(many, implementation=OURS).merge(fa4, on=flash.SHAPE, suffixes=("", "_fa4"))
    ratio = (both["ms"] / both["ms_fa4"]).astype(float)
    older = (both["run"] < flash.SINCE) | (both["run_fa4"] < flash.SINCE)
    star = older.map({True: "*", False: ""})
    both["cell"] = ratio.map("{:.2f}".format) + star
    masks = both["causal"].map({True: ", causal", False: ", no mask"})
    both["tokens"] = both["seq_len"].map(count) + masks + both["kind"].map(kinds)
    both["column"] = both["pass"] + ", " + both["head_dim"].astype(str)
    both = both.sort_values(["kind", "seq_len", "causal"], ascending=[False, True, False])
    wide = both.pivot(index="tokens", columns="column", values="cell")
    columns = ["forward, 64", "backward, 64", "forward, 128", "backward, 128"]
    return wide.loc[both["tokens"].unique(), columns].reset_index()


def grouped(rows: pd.DataFrame) -> pd.DataFrame:
    """Return GPU times in ms of grouped-query attention, by pass and shape: a2lib,
    FlashAttention-4 and cuDNN, the fastest of PyTorch's."""
    rows = rows[rows["pass"].isin(OWN)].sort_values(["heads", "kv_heads", "seq_len", "batch"])
    heads = rows["heads"].astype(str) + " : " + rows["kv_heads"].astype(str)
    tokens = rows["batch"].astype(str) + " × " + rows["seq_len"].map(count)
    rows["heads, tokens"] = heads + ", " + tokens
    wide = rows.pivot(index=["pass", "heads, tokens"], columns="implementation", values="ms")
    shapes = rows["heads, tokens"].unique()
    order = pd.MultiIndex.from_product([OWN, shapes], names=wide.index.names)
    wide = wide.loc[order, [OURS, flash.FA4, "sdpa_cudnn"]].apply(cells)
    return wide.rename(columns=LOOKS.label).reset_index()

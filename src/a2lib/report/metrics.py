"""What follows from measured rows: rates, shares of the ceiling, ratios, who is fastest where."""

from __future__ import annotations

import pandas as pd

from a2lib.theory.attention import attention_flops, matmul_flops

OURS = "a2lib"
SHAPE = ["dtype", "batch", "heads", "seq_len", "head_dim", "causal", "pass"]
LEVEL = 1.02  # two medians closer than this are called level


def with_tflops(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `tflops`, TFLOP/s as the FlashAttention papers count (useful products)."""
    flops = [
        attention_flops(int(r.batch), int(r.heads), int(r.seq_len), int(r.seq_len),
                        int(r.head_dim), bool(r.causal), r.pass_)
        for r in rows.rename(columns={"pass": "pass_"}).itertuples()
    ]  # fmt: skip
    return rows.assign(tflops=pd.Series(flops, rows.index, dtype="float64") / rows["ms"] / 1e9)


def with_speedup(rows: pd.DataFrame, over: str = "eager") -> pd.DataFrame:
    """The rows with `speedup`, the time of `over` at the same shape divided by the row's own.

    NaN where either has no time.
    """
    base = rows[rows["implementation"] == over].set_index(SHAPE)["ms"]
    base = base[~base.index.duplicated()]
    times = base.reindex(pd.MultiIndex.from_frame(rows[SHAPE])).to_numpy(dtype="float64")
    return rows.assign(speedup=times / rows["ms"])


def ceilings(ceiling: pd.DataFrame) -> dict[str, float]:
    """The best matrix-multiply rate measured for each dtype, in TFLOP/s."""
    best: dict[str, float] = {}
    for r in ceiling[(ceiling["operation"] == "matmul") & ceiling["ms"].notna()].itertuples():
        rate = matmul_flops(int(r.size), int(r.size), int(r.size)) / r.ms / 1e9
        best[r.dtype] = max(rate, best.get(r.dtype, 0.0))
    return best


def copy_bandwidth(ceiling: pd.DataFrame) -> float | None:
    """The best device-copy bandwidth measured, TB/s, bytes read plus bytes written."""
    copies = ceiling[(ceiling["operation"] == "copy") & ceiling["ms"].notna()]
    rates = [2 * int(r.size) / r.ms / 1e9 for r in copies.itertuples()]
    return max(rates, default=None)


def time_of(rows: pd.DataFrame, **where) -> float | None:
    """The median of the one row that matches, in ms; None where there is none with a time."""
    found = pick(rows, **where)["ms"].dropna()
    return float(found.iloc[0]) if len(found) else None


def pick(rows: pd.DataFrame, **where) -> pd.DataFrame:
    """The rows whose columns equal the values given (`pass_` stands for `pass`)."""
    for column, value in where.items():
        rows = rows[rows["pass" if column == "pass_" else column] == value]
    return rows


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per shape: `winner`, its `ms`, `ours_ms`, and `factor` = ours / the best of the rest.

    factor below 1 says ours is ahead of every peer, and it is NaN where either was not timed.
    """
    columns = [*SHAPE, "winner", "ms", "ours_ms", "peer", "peer_ms", "factor"]
    found = []
    for shape, group in rows.dropna(subset=["ms"]).groupby(SHAPE, sort=False):
        times = group.set_index("implementation")["ms"]
        ours = times.get(OURS, float("nan"))
        peers = times.drop(OURS, errors="ignore")
        peer, peer_ms = (peers.idxmin(), peers.min()) if len(peers) else ("", float("nan"))
        found.append([*shape, times.idxmin(), times.min(), ours, peer, peer_ms, ours / peer_ms])
    return pd.DataFrame(found, columns=columns)


def flat_until(rows: pd.DataFrame, implementation: str, within: float = 1.25) -> int | None:
    """The longest sequence whose time is within a factor of the least at any length.

    `rows` are those of one dtype, head size and pass. Up to there the launch is the cost: work
    only grows with length, so what is shorter and takes longer does so by the host's scatter.
    """
    times = pick(rows, implementation=implementation).dropna(subset=["ms"]).sort_values("seq_len")
    flat = times[times["ms"] <= within * times["ms"].min()]
    return int(flat["seq_len"].max()) if len(flat) else None


def level(one, other) -> bool:
    """Whether two timed rows are level: medians within LEVEL, or p20 to p80 of both overlap."""
    if max(one.ms, other.ms) <= LEVEL * min(one.ms, other.ms):
        return True
    return bool(one.ms_p20 <= other.ms_p80 and other.ms_p20 <= one.ms_p80)


def compare(ours: float | None, theirs: float | None) -> str:
    """How our time relates to theirs, in words that fit either outcome; "" if one is missing."""
    if ours is None or theirs is None:
        return ""
    if max(ours, theirs) <= LEVEL * min(ours, theirs):
        return "level with"
    if ours < theirs:
        return f"{theirs / ours:.2f} times as fast as"
    return f"{ours / theirs:.2f} times the time of"

"""What follows from measured rows: rates, shares of the ceiling, ratios, who is fastest where."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.theory.attention import attention_flops, matmul_flops

OURS = "a2lib"
SHAPE = ["dtype", "batch", "heads", "seq_len", "head_dim", "causal", "pass"]
LEVEL = 1.02  # two medians closer than this are called level, whatever their quantiles


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


def row_of(rows: pd.DataFrame, **where):
    """The first row that matches, as a named tuple with `pass_`; None where there is none."""
    return next(iter(pick(rows, **where).rename(columns={"pass": "pass_"}).itertuples()), None)


def timed_row(rows: pd.DataFrame, **where):
    """The first row that matches and has a time, as a named tuple; None where there is none."""
    return row_of(rows.dropna(subset=["ms"]), **where)


def pick(rows: pd.DataFrame, **where) -> pd.DataFrame:
    """The rows whose columns equal the values given (`pass_` stands for `pass`)."""
    for column, value in where.items():
        rows = rows[rows["pass" if column == "pass_" else column] == value]
    return rows


def level(one, other) -> bool:
    """Whether two rows tie: medians within 2 %, or ranges from p20 to p80 that overlap.

    Rows are named tuples or Series with ms, ms_p20 and ms_p80; a blank quantile counts as the
    median.
    """
    if max(one.ms, other.ms) <= LEVEL * min(one.ms, other.ms):
        return True
    (low, high), (other_low, other_high) = _range(one), _range(other)
    return low <= other_high and other_low <= high


def _range(row) -> tuple[float, float]:
    low = row.ms if pd.isna(row.ms_p20) else row.ms_p20
    return low, row.ms if pd.isna(row.ms_p80) else row.ms_p80


def fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per shape: `winner`, its `ms`, `ours_ms`, the best `peer` of the rest, its `peer_ms`.

    `factor` is ours / the best peer: below 1 says ours is ahead, NaN that either was not timed.
    `verdict` is how ours stands, by level: "ahead", "level", "behind", or "" without a factor.
    `tied` says whether the winner ties with the next, so that nobody has won.
    """
    columns = [*SHAPE, "winner", "ms", "ours_ms", "peer", "peer_ms", "factor", "verdict", "tied"]
    found = []
    for shape, group in rows.dropna(subset=["ms"]).groupby(SHAPE, sort=False):
        timed = {row.implementation: row for row in group.itertuples()}
        order = sorted(timed.values(), key=lambda row: row.ms)
        ours = timed.get(OURS)
        peer = next((row for row in order if row.implementation != OURS), None)
        verdict = ""
        if ours and peer:
            ahead = "ahead" if ours.ms < peer.ms else "behind"
            verdict = "level" if level(ours, peer) else ahead
        ours_ms = ours.ms if ours else float("nan")
        peer_ms = peer.ms if peer else float("nan")
        found.append([*shape, order[0].implementation, order[0].ms, ours_ms,
                      peer.implementation if peer else "", peer_ms, ours_ms / peer_ms, verdict,
                      len(order) > 1 and level(order[0], order[1])])  # fmt: skip
    return pd.DataFrame(found, columns=columns)


def tally(rows: pd.DataFrame) -> dict[str, int]:
    """How many shapes ours is ahead of every peer in, level with the best, and behind it."""
    verdicts = list(fastest(rows)["verdict"])
    return {verdict: verdicts.count(verdict) for verdict in ("ahead", "level", "behind")}


def compare(ours, theirs) -> str:
    """How our row's time relates to theirs, in words that fit any outcome; "" if one is missing."""
    if ours is None or theirs is None:
        return ""
    if level(ours, theirs):
        return "is level with"
    if ours.ms < theirs.ms:
        return f"is {theirs.ms / ours.ms:.2f} times as fast as"
    return f"takes {ours.ms / theirs.ms:.2f} times the time of"


def by_graph(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the GPU's own time as `ms`, without spread, wherever they have one.

    A row that was not replayed from a CUDA graph keeps its time as called.
    """
    known = rows["ms_graph"].notna()
    spread = {name: rows[name].where(~known) for name in ("ms_p20", "ms_p80")}
    return rows.assign(ms=rows["ms_graph"].where(known, rows["ms"]), **spread)


def slopes(rows: pd.DataFrame, column: str) -> dict[int, float]:
    """Length -> log2 of the time over that at half the length, of one curve: 2 where N^2 rules."""
    known = rows.dropna(subset=[column])
    times = dict(zip(known["seq_len"].astype(int), known[column].astype(float), strict=True))
    return {n: math.log2(times[n] / times[n // 2]) for n in sorted(times) if n // 2 in times}

"""What follows from measured rows: rates, shares of the ceiling, ratios, who is fastest where."""

from __future__ import annotations

import keyword
import math
from collections import namedtuple
from functools import cache

import numpy as np
import pandas as pd

from a2lib.report.view import View
from a2lib.theory.products import matmul_flops

OURS = "a2lib"
LEVEL = 1.02  # two medians closer than this are called level, whatever their quantiles


def with_speedup(rows: pd.DataFrame, view: View, over: str) -> pd.DataFrame:
    """The rows with `speedup`, the time of `over` in the same case divided by the row's own.

    NaN where either has no time.
    """
    case = list(view.case)
    base = rows[rows[view.by] == over].set_index(case)["ms"]
    base = base[~base.index.duplicated()]
    times = base.reindex(pd.MultiIndex.from_frame(rows[case])).to_numpy(dtype="float64")
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
    """The first row that matches, as a named tuple; None where there is none.

    A column that is called like a word of Python has an underscore after its name.
    """
    return _first(rows, _matching(rows, where))


def timed_row(rows: pd.DataFrame, **where):
    """The first row that matches and has a time, as a named tuple; None where there is none."""
    return _first(rows, _matching(rows, where) & rows["ms"].notna().to_numpy())


def pick(rows: pd.DataFrame, **where) -> pd.DataFrame:
    """The rows whose columns equal the values given (`class_` stands for a column `class`)."""
    return rows[_matching(rows, where)]


def _matching(rows: pd.DataFrame, where: dict) -> np.ndarray:
    found = np.ones(len(rows), dtype=bool)
    for column, value in where.items():
        plain = column.removesuffix("_")
        equal = rows[plain if keyword.iskeyword(plain) else column] == value
        found &= equal.to_numpy(dtype=bool, na_value=False)
    return found


def _first(rows: pd.DataFrame, matching: np.ndarray):
    if not matching.any():
        return None
    at = int(matching.argmax())
    # itertuples() would make a class and a Series a column for the one row, at ten times the cost.
    values = (v.item() if isinstance(v, np.generic) else v for v in rows.iloc[at])
    return _kind(tuple(rows))(rows.index[at], *values)


@cache
def _kind(columns: tuple[str, ...]):
    names = [f"{name}_" if keyword.iskeyword(name) else name for name in columns]
    return namedtuple("Row", ["Index", *names], rename=True)


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


def fastest(rows: pd.DataFrame, view: View) -> pd.DataFrame:
    """One row per case: `winner`, its `ms`, `ours_ms`, the best `peer` of the rest, its `peer_ms`.

    `factor` is ours / the best peer: below 1 says ours is ahead, NaN that either was not timed.
    `verdict` is how ours stands, by level: "ahead", "level", "behind", or "" without a factor.
    `tied` says whether the winner ties with the next, so that nobody has won.
    """
    case = list(view.case)
    columns = [*case, "winner", "ms", "ours_ms", "peer", "peer_ms", "factor", "verdict", "tied"]
    found = []
    for values, group in rows.dropna(subset=["ms"]).groupby(case, sort=False):
        timed = dict(zip(group[view.by], group.itertuples(), strict=True))
        order = sorted(timed, key=lambda name: timed[name].ms)
        ours = timed.get(view.ours)
        best = next((name for name in order if name != view.ours), "")
        peer = timed.get(best)
        verdict = ""
        if ours and peer:
            ahead = "ahead" if ours.ms < peer.ms else "behind"
            verdict = "level" if level(ours, peer) else ahead
        ours_ms = ours.ms if ours else float("nan")
        peer_ms = peer.ms if peer else float("nan")
        found.append([*values, order[0], timed[order[0]].ms, ours_ms, best, peer_ms,
                      ours_ms / peer_ms, verdict,
                      len(order) > 1 and level(timed[order[0]], timed[order[1]])])  # fmt: skip
    return pd.DataFrame(found, columns=columns)


def against_best(cell: pd.DataFrame, view: View) -> tuple[float, bool]:
    """Ours / the fastest peer among the rows of one case, and whether the two are level.

    NaN and False where either has no time.
    """
    timed = cell.dropna(subset=["ms"]).sort_values("ms")
    ours = list(timed[timed[view.by] == view.ours].itertuples())
    peers = list(timed[timed[view.by] != view.ours].itertuples())
    if not (ours and peers):
        return float("nan"), False
    return ours[0].ms / peers[0].ms, level(ours[0], peers[0])


def tally(rows: pd.DataFrame, view: View) -> dict[str, int]:
    """How many cases ours is ahead of every peer in, level with the best, and behind it."""
    verdicts = list(fastest(rows, view)["verdict"])
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


def slopes(rows: pd.DataFrame, column: str, along: str) -> dict[int, float]:
    """Size -> log2 of the time over that at half the size, of one curve: 2 where n^2 rules."""
    known = rows.dropna(subset=[column])
    times = dict(zip(known[along].astype(int), known[column].astype(float), strict=True))
    return {n: math.log2(times[n] / times[n // 2]) for n in sorted(times) if n // 2 in times}

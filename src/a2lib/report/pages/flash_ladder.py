"""The ladder of attention: what each technique gains."""

import pandas as pd

from a2lib.report.page import one, pick
from a2lib.report.plots import lying
from a2lib.report.style import COLOURS, chart
from a2lib.report.units import digits

LIBRARY = "query_chunks"
RUNGS = {
    "every_tile": "mask in every tile",
    "to_diagonal": "skip masked tiles",
    "two_loops": "mask on the diagonal only",
    "tuned_tiles": "tuned tile sizes",
    "one_consumer": "warp-specialized forward",
    "consumers": "several consumers",
    "one_sweep": "one-sweep backward",
    "heads_in_l2": "L2-aware scheduling",
    "key_chunks": "split-KV forward",
    LIBRARY: "backward split by queries",
}
PEERS = {"sdpa_cudnn": "cuDNN", "sdpa_flash": "FA2"}
SHAPES = {"board": "16 heads of 64", "wide": "16 heads of 128", "few": "one head of 64"}
# The steps that a figure shows, each behind those that are left out before it.
SHOWN = {
    "every_tile": "plain Triton",
    "tuned_tiles": "tuned tiles",
    "consumers": "specialized forward",
    "one_sweep": "one-sweep backward",
    LIBRARY: "split rows",
}
# Steps whose kernels and schedules are those of the step before, at a shape: the library splits
# where tiles are few, schedules several heads by the L2 cache, and has one consumer where tiles are
# few.
SAME = {
    "board": ("key_chunks", LIBRARY),
    "wide": ("key_chunks", LIBRARY),
    "few": ("consumers", "heads_in_l2"),
}


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return the rows with more columns.

    kind: one of ``SHAPES``
    gain: the time of the step before over this one's, of the same GPU, shape and pass; none for the
        first step and for peers
    """
    kinds = {(16, 64): "board", (16, 128): "wide", (1, 64): "few"}
    shapes = pd.Series(zip(rows["heads"], rows["head_dim"], strict=True), rows.index)
    derived = rows.assign(kind=shapes.map(kinds))
    wide = derived.pivot(index=["kind", "pass", "gpu"], columns="rung", values="ms")
    steps = wide.reindex(columns=list(RUNGS)).astype(float)
    gains = steps.shift(axis=1) / steps
    gains = gains.stack().rename("gain").reset_index()
    return derived.merge(gains, "left", ["kind", "pass", "gpu", "rung"])


def newest(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the last run, which is of one GPU; a run's name begins with its time."""
    return rows[rows["run"] == rows["run"].max()]


def gain(rows: pd.DataFrame, kind: str, rung: str) -> float:
    """Return what a step gains in both passes at a shape, in the last run."""
    return float(one(newest(rows), kind=kind, rung=rung, pass_="end_to_end").gain)


def ms(rows: pd.DataFrame, kind: str, rung: str) -> float:
    """Return the GPU time of both passes by a step, or by a peer, in the last run."""
    return float(one(newest(rows), kind=kind, rung=rung, pass_="end_to_end").ms)


def gains(rows: pd.DataFrame, kind: str, rung: str) -> pd.Series:
    """Return what a step gains in both passes at a shape, on each GPU."""
    return pick(rows, kind=kind, rung=rung, pass_="end_to_end")["gain"].astype(float)


def spread(rows: pd.DataFrame) -> float:
    """Return by how much at most a step's gain in both passes differs from GPU to GPU: the largest
    over the least, less 1."""
    both = pick(rows, pass_="end_to_end", rung=list(RUNGS)).dropna(subset=["gain"])
    gains = both.groupby(["kind", "rung"])["gain"]
    return float((gains.max() / gains.min()).max() - 1)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the first step's time, each step's gain, and the times of the library and the peers,
    a column for each shape."""
    lines = {"step": ["*first step*", *list(RUNGS.values())[1:], "**the library**"]}
    lines["step"] += PEERS.values()
    for kind, name in SHAPES.items():
        column = [_in_ms(rows, kind, "every_tile")]
        for rung in list(RUNGS)[1:]:
            is_same = rung in SAME[kind]
            column.append("·" if is_same else digits(gain(rows, kind, rung), 3))
        for rung in (LIBRARY, *PEERS):
            column.append(_in_ms(rows, kind, rung))
        lines[name] = column
    return pd.DataFrame(lines)


def _in_ms(rows: pd.DataFrame, kind: str, rung: str) -> str:
    return f"{digits(ms(rows, kind, rung), 3)} ms"


@chart(height=2.9)
def bars(figure, rows: pd.DataFrame):
    """Draw the GPU time of both passes after the steps in SHOWN and of the peers: heads of 64, 16
    of them at the left, one at the right."""
    left, right = figure.subplots(1, 2)
    _draw_bars(left, rows, "board", "ms", 1)
    _draw_bars(right, rows, "few", "µs", 1000)
    right.set_yticklabels([])


def _draw_bars(ax, rows: pd.DataFrame, kind: str, unit: str, per_ms: int):
    names = SHOWN | PEERS
    times = [per_ms * ms(rows, kind, rung) for rung in names]
    colours = [COLOURS[0]] * len(SHOWN) + [COLOURS[4]] * len(PEERS)
    drawn = ax.barh(range(len(names)), times, height=0.66, color=colours)
    ax.bar_label(drawn, [digits(time, 3) for time in times], padding=4)
    ax.grid(False)
    lying(ax, names.values(), max(times), f"both passes, {unit}", room=0.3)
    ax.set_title(SHAPES[kind], loc="left")

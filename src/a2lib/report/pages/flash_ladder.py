"""The ladder of attention: what each technique gains, over the GPUs it was measured on."""

import pandas as pd

from a2lib.report.page import pick

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
# Steps whose kernels and schedules are those of the step before, at a shape: the library splits
# where tiles are few, schedules several heads by the L2 cache, and has one consumer where tiles are
# few.
SAME = {
    "board": ("key_chunks", LIBRARY),
    "wide": ("key_chunks", LIBRARY),
    "few": ("consumers", "heads_in_l2"),
}
PASSES = {"forward": "forward", "end_to_end": "both passes"}
# The first run, of one GPU, in which masked heads of 64 have three consumers that take turns. The
# runs of the three other GPUs are a day older.
SINCE = "20261129"


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return the rows with more columns, each of the same GPU, shape and pass.

    kind: one of ``SHAPES``
    gain: the time of the step before over this one's; none for the first step and for peers
    cudnn, fa2: this step's time over theirs
    """
    kinds = {(16, 64): "board", (16, 128): "wide", (1, 64): "few"}
    cells = zip(rows["heads"], rows["head_dim"], strict=True)
    derived = rows.assign(kind=[kinds.get(cell) for cell in cells])
    wide = derived.pivot(index=["kind", "pass", "gpu"], columns="rung", values="ms")
    wide = wide.reindex(columns=[*RUNGS, *PEERS]).astype(float)
    ratios = {
        "gain": wide[[*RUNGS]].shift(axis=1) / wide[[*RUNGS]],
        "cudnn": wide.div(wide["sdpa_cudnn"], axis=0),
        "fa2": wide.div(wide["sdpa_flash"], axis=0),
    }
    key = ["kind", "pass", "gpu", "rung"]
    for name, table in ratios.items():
        derived = derived.merge(table.stack().rename(name).reset_index(), "left", key)
    return derived


def rungs(rows: pd.DataFrame, kind: str, pass_: str = "end_to_end") -> pd.DataFrame:
    """Return the medians over the GPUs of a shape's ``ms`` and ``gain``, a line for each step."""
    medians = pick(rows, kind=kind, pass_=pass_).groupby("rung")[["ms", "gain"]].median()
    return medians.reindex([*RUNGS, *PEERS]).astype(float)


def gain(rows: pd.DataFrame, kind: str, rung: str, pass_: str = "end_to_end") -> pd.Series:
    """Return what a step gains at a shape, GPU by GPU."""
    return pick(rows, kind=kind, rung=rung, pass_=pass_)["gain"].astype(float)


def noise(rows: pd.DataFrame, pass_: str = "end_to_end") -> float:
    """Return how far from 1 the gain of a step is at most that changes nothing, with 16 heads."""
    gains = []
    for kind in ("board", "wide"):
        gains += [gain(rows, kind, rung, pass_) for rung in SAME[kind]]
    return float((pd.concat(gains) - 1).abs().max())

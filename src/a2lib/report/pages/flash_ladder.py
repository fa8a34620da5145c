"""The ladder of attention: what each technique gains, over the GPUs it was measured on."""

import pandas as pd
from matplotlib.ticker import LogLocator

from a2lib.report import plots
from a2lib.report.page import pick
from a2lib.report.panels import REFERENCE_LINE
from a2lib.report.style import COLOURS, DIM, Chart
from a2lib.report.tables import cells
from a2lib.report.units import digits, ms

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
SHAPES = {
    "board": "16 heads of 64, 16,384 tokens",
    "wide": "16 heads of 128, 16,384 tokens",
    "few": "one head of 64, 4,096 tokens",
}
SHORT = {"board": "16 heads of 64", "wide": "16 heads of 128", "few": "one head of 64"}
# Steps whose kernels and schedules are those of the step before, at a shape: the library splits
# where tiles are few, schedules several heads by the L2 cache, and has one consumer where tiles are
# few.
SAME = {
    "board": ("key_chunks", LIBRARY),
    "wide": ("key_chunks", LIBRARY),
    "few": ("consumers", "heads_in_l2"),
}
PASSES = {"forward": "forward", "end_to_end": "both passes"}
# The first run in which masked heads of 64 have three consumers. Earlier runs, of three GPUs, stay
# in data/ and are not of these kernels.
SINCE = "20261129"


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """Return the rows of these kernels with more columns, each of the same GPU, shape and pass.

    kind: one of ``SHAPES``
    gain: the time of the step before over this one's; none for the first step and for peers
    cudnn, fa2: this step's time over theirs
    """
    rows = rows[rows["run"] >= SINCE]
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


def climb(rows: pd.DataFrame, *kinds: str) -> Chart:
    """Draw forward and backward of each shape from step to step, with the gain; dashed: peers."""

    def draw(figure):
        axes = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
        for ax, kind in zip(axes, kinds, strict=True):
            _climb(ax, rows, kind)
        axes[-1].set_xlabel("forward and backward, ms")

    return Chart(draw, height=3.5 * len(kinds))


def _climb(ax, rows: pd.DataFrame, kind: str) -> None:
    medians, unsure = rungs(rows, kind), noise(rows)
    steps = [name for name in RUNGS if name not in SAME[kind]]
    shown = medians.loc[steps].dropna(subset="ms")
    names = [RUNGS[name] for name in shown.index]
    words = [f"{ms(r.ms, 3)}{_gain(r.gain, unsure)}" for r in shown.itertuples()]
    time = list(shown["ms"])
    if LIBRARY in SAME[kind]:
        names.append("the library")
        words.append(ms(medians["ms"][LIBRARY], 3))
        time.append(medians["ms"][LIBRARY])
    ax.plot(time, range(len(time)), color=COLOURS[0], marker="o")
    for y, said in enumerate(words):
        plots.label(ax, said, (1, y), xycoords=("axes fraction", "data"), va="center")
    ax.margins(x=0.4)  # for the peers' names
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.minorticks_off()
    ax.set(yticks=range(len(names)), yticklabels=names)
    ax.set(ylim=(len(names) - 0.5, -1.3))
    ax.grid(False, axis="y")
    for (name, label), side, off in zip(PEERS.items(), ("right", "left"), (-3, 3), strict=True):
        peer = medians["ms"][name]
        ax.axvline(peer, **REFERENCE_LINE)
        plots.label(ax, label, (peer, -0.85), (off, 0), color=DIM, ha=side)
    ax.set_title(SHAPES[kind], loc="left")


def _gain(gain: float, unsure: float) -> str:
    """Return the words for a gain; one within the noise is no gain."""
    if gain != gain:
        return ""
    return ", no gain" if abs(gain - 1) <= unsure else f", ×{digits(gain, 3)}"


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each step and peer: at each shape its ms and what the step gains."""
    columns = {"step": [*RUNGS.values(), *PEERS.values()]}
    for kind, short in SHORT.items():
        medians = rungs(rows, kind)
        columns[f"{short}, ms"] = cells(medians["ms"])
        columns[f"{short}, gain"] = cells(medians["gain"])
    return pd.DataFrame(columns)

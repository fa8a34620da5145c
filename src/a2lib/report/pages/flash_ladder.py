"""The ladder of attention: what each technique gains, over the GPUs it was measured on."""

import pandas as pd
from matplotlib.ticker import LogLocator

from a2lib.report import plots
from a2lib.report.page import pick
from a2lib.report.panels import REFERENCE_LINE
from a2lib.report.style import COLOURS, DIM, Chart
from a2lib.report.units import digits, ms, span, times

LIBRARY = "query_chunks"
RUNGS = {
    "every_tile": "a mask in each tile",
    "to_diagonal": "none above the diagonal",
    "two_loops": "no mask below it",
    "tuned_tiles": "tiles by measurement",
    "one_consumer": "Hopper forward",
    "consumers": "several consumers",
    "one_sweep": "Hopper backward",
    "heads_in_l2": "heads that L2 holds",
    "key_chunks": "keys in chunks",
    LIBRARY: "queries in chunks",
}
PEERS = {"sdpa_cudnn": "cuDNN", "sdpa_flash": "FA2"}
SHAPES = {
    "board": "16 heads of 64, 16,384 tokens",
    "wide": "16 heads of 128, 16,384 tokens",
    "few": "one head of 64, 4,096 tokens",
}
# Rungs that choose nothing else there: heads share L2 where there are several, programs keys or
# queries where tiles are few; few tiles, and heads of 64 under a mask, have one consumer.
SAME = {
    "board": ("key_chunks", "consumers", LIBRARY),
    "wide": ("key_chunks", LIBRARY),
    "few": ("consumers", "heads_in_l2"),
}
PASSES = {"forward": "forward", "end_to_end": "forward and backward"}


def columns(rows: pd.DataFrame, rows_of) -> pd.DataFrame:
    """The rows with ``kind``, of ``SHAPES``, and times of the same GPU, shape and pass: ``gain``,
    the time of the rung before over this one's (none of the first, nor of a peer), ``cudnn`` and
    ``fa2``, this one's over theirs."""
    kinds = {(16, 64): "board", (16, 128): "wide", (1, 64): "few"}
    found = rows.assign(
        kind=[kinds.get((h, d)) for h, d in zip(rows["heads"], rows["head_dim"], strict=True)]
    )
    wide = found.pivot(index=["kind", "pass", "gpu"], columns="rung", values="ms")
    wide = wide.reindex(columns=[*RUNGS, *PEERS]).astype(float)
    before = wide[[*RUNGS]].shift(axis=1)
    derived = {
        "gain": before / wide[[*RUNGS]],
        "cudnn": wide.div(wide["sdpa_cudnn"], axis=0),
        "fa2": wide.div(wide["sdpa_flash"], axis=0),
    }
    key = ["kind", "pass", "gpu", "rung"]
    for name, table in derived.items():
        found = found.merge(table.stack().rename(name).reset_index(), "left", key)
    return found


def rungs(rows: pd.DataFrame, kind: str, pass_: str = "end_to_end") -> pd.DataFrame:
    """Medians over the GPUs of a shape's ``ms`` and ``gain``, a line for each rung, in order."""
    found = pick(rows, kind=kind, pass_=pass_).groupby("rung")[["ms", "gain"]].median()
    return found.reindex([*RUNGS, *PEERS]).astype(float)


def climb(rows: pd.DataFrame, *kinds: str) -> Chart:
    """Forward and backward of each shape from rung to rung, with its gain; dashed: the peers."""

    def draw(figure):
        axes = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
        for ax, kind in zip(axes, kinds, strict=True):
            found = rungs(rows, kind)
            own = found.loc[[name for name in RUNGS if name not in SAME[kind]]].dropna(subset="ms")
            ax.plot(own["ms"], range(len(own)), color=COLOURS[0], marker="o")
            beside = {"xycoords": ("axes fraction", "data"), "va": "center"}
            for y, (time, gain) in enumerate(zip(own["ms"], own["gain"], strict=True)):
                plots.label(ax, f"{ms(time, 3)}{_gain(gain, ', ')}", (1, y), **beside)
            ax.margins(x=0.25)  # for the peers' names
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.minorticks_off()
            ax.set(yticks=range(len(own)), yticklabels=[RUNGS[n] for n in own.index])
            ax.set(ylim=(len(own) - 0.5, -1.3), xlabel="forward and backward, ms")
            ax.grid(False, axis="y")
            for (name, label), side, off in zip(
                PEERS.items(), ("right", "left"), (-3, 3), strict=True
            ):
                at = found["ms"][name]
                ax.axvline(at, **REFERENCE_LINE)
                plots.label(ax, label, (at, -0.85), (off, 0), color=DIM, ha=side)
            ax.set_title(SHAPES[kind], loc="left")

    return Chart(draw, height=3.3 * len(kinds))


def _gain(gain: float, before: str = "") -> str:
    return "" if gain != gain else f"{before}×{digits(gain, 3)}"


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each rung and peer: at each shape the ms of the forward and of both passes, and
    what the rung gains of both."""
    found = {(kind, pass_): rungs(rows, kind, pass_) for kind in SHAPES for pass_ in PASSES}
    names = ["rung"]
    for short in ("64", "128", "one head"):
        names += [f"{short}, {what}" for what in ("forward", "both", "gain")]
    lines = []
    for name, label in (RUNGS | PEERS).items():
        line = [label]
        for kind in SHAPES:
            line += [digits(found[kind, p]["ms"][name], 3) for p in PASSES]
            line.append(_gain(found[kind, "end_to_end"]["gain"][name]))
        lines.append(line)
    return pd.DataFrame(lines, columns=names)


def machines(rows: pd.DataFrame) -> pd.DataFrame:
    """The library and its peers, ms, and the first over each, as ranges over the GPUs."""
    lines = []
    for kind, label in SHAPES.items():
        for pass_, title in PASSES.items():
            here = pick(rows, kind=kind, pass_=pass_, status="ok")
            own = pick(here, rung=LIBRARY)
            line = [f"{label}, {title}", span(own["ms"], digits, 3)]
            for name, ratio in (("sdpa_cudnn", "cudnn"), ("sdpa_flash", "fa2")):
                line += [span(pick(here, rung=name)["ms"], digits, 3), span(own[ratio], times, 3)]
            lines.append(line)
    names = ["ours", "cuDNN", "ours / cuDNN", "FA2", "ours / FA2"]
    return pd.DataFrame(lines, columns=["", *names])

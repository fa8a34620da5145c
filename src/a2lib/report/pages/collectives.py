"""Collectives: bandwidths, and the line of overhead and bandwidth through measured messages."""

import pandas as pd

from a2lib.report import data
from a2lib.report.page import one, pick
from a2lib.report.panels import doubling_axis, name_ends
from a2lib.report.plots import ROOM, lines, log_values, reference
from a2lib.report.style import Look, Looks, chart
from a2lib.theory.latency import Line, fit, wire_share

HANDOUT = (1 << 20, 10 << 20, 100 << 20, 1 << 30)  # bytes
LOOKS = Looks(
    queued=Look("queued", "#d55e00", "o", ours=True),
    isolated=Look("isolated", "#0072b2", "^"),
    gloo=Look("gloo", "#808080", "s"),
)


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """The rows with ``bus`` and ``bus_queued`` in GB/s, what each rank must send in a ring over
    the time, and ``ranks``, who took part."""
    sent = [
        int(r.size) * wire_share(r.operation, int(r.world_size)) / 1e6 for r in rows.itertuples()
    ]
    backends = rows["backend"].map({"nccl": "NCCL, {} GPUs", "gloo": "gloo, {} processes"})
    ranks = [b.format(n) for b, n in zip(backends, rows["world_size"], strict=True)]
    return rows.assign(bus=sent / rows["ms"], bus_queued=sent / rows["ms_queued"], ranks=ranks)


def queued(rows: pd.DataFrame, operation: str = "all_reduce") -> tuple[list, list]:
    """Bytes, and seconds, of NCCL's queued messages in fp32 between two GPUs; raises Missing
    without rows."""
    few = pick(rows, operation=operation, dtype="fp32", backend="nccl", world_size=2)
    few = few.dropna(subset=["ms_queued"])
    return list(few["size"].astype(float)), list(few["ms_queued"] / 1e3)


def fitted(rows: pd.DataFrame) -> Line:
    """The line through the all-reduces that ``queued`` gives."""
    return fit(*queued(rows))


def misses(rows: pd.DataFrame) -> pd.Series:
    """What that line misses of each time, relative, by size."""
    sizes, times_s = queued(rows)
    return pd.Series(fit(sizes, times_s).residuals(sizes, times_s), index=sizes)


def link() -> float:
    """What the maker states of the published device's links, GB/s in one direction."""
    return float(one(data.load_devices(), device=data.PUBLISHED, quantity="nvlink_egress").value)


@chart(height=3.4, room=ROOM)
def bandwidth(figure, rows: pd.DataFrame):
    """Bus bandwidth against size: queued and isolated by NCCL, and gloo between two."""
    sums = pick(rows, operation="all_reduce", dtype="fp32", world_size=2)
    nccl, gloo = pick(sums, backend="nccl"), pick(sums, backend="gloo")
    queued = nccl.assign(way="queued", rate=nccl["bus_queued"])
    isolated = nccl.assign(way="isolated", rate=nccl["bus"])
    shown = pd.concat([queued, isolated, gloo.assign(way="gloo", rate=gloo["bus"])])
    line = fitted(rows)
    ax = figure.subplots()
    ends = lines(ax, shown, "size", "rate", "way", LOOKS)
    doubling_axis(ax)
    log_values(ax)
    ax.set(xlabel="bytes of the tensor", ylabel="bus bandwidth, GB/s", ylim=(0.05, 900))
    reference(ax, link(), "the link, one way")
    reference(ax, line.half_size, "half speed", vertical=True)
    return lambda: name_ends(figure, ax, ends, LOOKS)


@chart(height=1.7)
def parts(figure, line: Line):
    """Overhead and bytes of three messages, as shares of their time."""
    ax = figure.subplots()
    sizes = {"1 MiB": 1 << 20, "10 MiB": 10 << 20, "100 MiB": 100 << 20}
    shares = [line.overhead_s / line.time_s(s) for s in sizes.values()]
    ax.barh(list(sizes), shares, color="#f0ad78", height=0.6)
    ax.barh(list(sizes), [1 - s for s in shares], left=shares, color="#86b6e6", height=0.6)
    for y, share in enumerate(shares):
        ax.annotate("overhead" if share > 0.2 else "", (0.01, y), va="center")
        ax.annotate("bytes", (0.99, y), va="center", ha="right")
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, 1), xlabel="share of the message's time")

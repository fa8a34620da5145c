"""Collectives: bandwidths, and the line of overhead and bandwidth through measured times."""

import pandas as pd

from a2lib.report import data
from a2lib.report.metrics import stated
from a2lib.report.page import one, pick
from a2lib.report.panels import doubling_axis, name_ends
from a2lib.report.plots import lines, log_values, reference
from a2lib.report.style import Look, Looks, chart
from a2lib.report.tables import cells
from a2lib.report.units import count, digits, span
from a2lib.theory.latency import Line, fit, wire_share

MIB, GIB = 1 << 20, 1 << 30
HANDOUT = (1 * MIB, 10 * MIB, 100 * MIB, GIB)
HOSTS = ("host of eight H200", "host of six H100", "host of six L4")
LOOKS = Looks(
    queued=Look("back to back", "#d55e00", "o", ours=True),
    isolated=Look("synchronized", "#0072b2", "^"),
    gloo=Look("gloo", "#808080", "s"),
)


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each row its bus bandwidth, what each rank sends in a ring over the time.

    bus: GB/s of a synchronized call
    bus_queued: GB/s of calls back to back
    ranks: who took part, in words
    """
    calls = zip(rows["operation"], rows["world_size"], strict=True)
    shares = [wire_share(operation, int(ranks)) for operation, ranks in calls]
    sent = rows["size"].astype(float) * shares / 1e6
    words = rows["backend"].map({"nccl": "NCCL, {} GPUs", "gloo": "gloo, {} processes"})
    ranks = [word.format(n) for word, n in zip(words, rows["world_size"], strict=True)]
    return rows.assign(bus=sent / rows["ms"], bus_queued=sent / rows["ms_queued"], ranks=ranks)


def call(
    rows: pd.DataFrame,
    size: int,
    operation: str = "all_reduce",
    *,
    backend: str = "nccl",
    world_size: int = 2,
    dtype: str = "fp32",
):
    """Return the row of one collective."""
    return one(
        rows,
        size=size,
        operation=operation,
        backend=backend,
        world_size=world_size,
        dtype=dtype,
    )


def between_two_gpus(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the all-reduces in fp32 between two GPUs."""
    return pick(rows, operation="all_reduce", backend="nccl", world_size=2, dtype="fp32")


def queued(rows: pd.DataFrame, operation: str = "all_reduce") -> tuple[list, list]:
    """Return bytes and seconds of NCCL's back-to-back collectives in fp32 between two GPUs; raise
    Missing without rows."""
    few = pick(rows, operation=operation, dtype="fp32", backend="nccl", world_size=2)
    few = few.dropna(subset=["ms_queued"])
    return list(few["size"].astype(float)), list(few["ms_queued"] / 1e3)


def fitted(rows: pd.DataFrame) -> Line:
    """Return the line through the all-reduces that ``queued`` returns."""
    return fit(*queued(rows))


def misses(rows: pd.DataFrame) -> pd.Series:
    """Return how far each time is from that line, relative, by size."""
    sizes, times_s = queued(rows)
    return pd.Series(fit(sizes, times_s).residuals(sizes, times_s), index=sizes)


def link() -> float:
    """Return the data sheet's bandwidth of the published device's links, GB/s in one direction."""
    return stated(data.PUBLISHED, "nvlink_egress")


def handout_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return ms of synchronized all-reduces at the handout's sizes, by backend and ranks."""
    same = (rows["operation"] == "all_reduce") & (rows["dtype"] == "fp32")
    few = rows[same & rows["size"].isin(HANDOUT)]
    table = few.pivot(index="ranks", columns="size", values="ms").map(lambda ms: digits(ms, 3))
    table.columns = [f"{size // MIB} MiB" if size < GIB else "1 GiB" for size in table.columns]
    at_gib = few[few["size"] == GIB].set_index("ranks")["bus"]
    table["GB/s at 1 GiB"] = at_gib.map(lambda rate: digits(rate, 3))
    return table.reset_index()


def small_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return all-reduces of up to 25 MiB between two GPUs, back to back and synchronized, in us."""
    line = fitted(rows)
    texts = []
    for row in between_two_gpus(rows).sort_values("size").itertuples():
        if row.size > 25 * MIB:
            continue
        size = f"{row.size // 1024} KiB" if row.size < MIB else f"{row.size // MIB} MiB"
        times = (1e3 * row.ms_queued, 1e6 * line.time_s(row.size), 1e3 * row.ms)
        texts.append([size, *cells(times)])
    return pd.DataFrame(texts, columns=["tensor", "back to back", "fitted line", "synchronized"])


def published(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what others published with ``ms`` and ``bus``, from the means where only they are."""
    times = rows["ms"].fillna(rows["ms_mean"])
    return columns(rows.assign(ms=times, ms_queued=float("nan")))


def hosts_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return ms of all-reduces on the hosts that have several GPUs, by number of GPUs and size."""
    is_large = rows["size"] > 9e8
    sizes = rows.assign(size=rows["size"].mask(is_large, GIB))
    table = sizes.pivot(index=["device", "world_size"], columns="size", values="ms")
    table = table.map(lambda ms: digits(ms, 3)).rename(columns=lambda size: f"{size // MIB:,} MiB")
    at_gib = rows[is_large].set_index(["device", "world_size"])["bus"]
    table["GB/s at the largest"] = at_gib.map(lambda rate: digits(rate, 3))
    return table.reset_index().rename(columns={"world_size": "GPUs"})


def published_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what others published, as text."""
    table = rows[["device", "backend", "world_size", "size"]]
    table = table.assign(ms=cells(rows["ms"]))
    return table.rename(columns={"world_size": "ranks", "size": "bytes"})


def every_call(rows: pd.DataFrame) -> pd.DataFrame:
    """Return every row of the section as text, times in ms."""
    texts = []
    order = ["operation", "backend", "world_size", "dtype", "size"]
    for row in rows.sort_values(order).itertuples():
        spread = span((row.ms_p20, row.ms_p80), digits, 3)
        synchronized, back_to_back, rate = cells((row.ms, row.ms_queued, row.bus))
        words = [row.operation, row.ranks, row.dtype, count(row.size)]
        texts.append([*words, synchronized, spread, back_to_back, rate])
    heads = ["operation", "ranks", "dtype", "bytes", "synchronized", "20 to 80 %", "back to back"]
    return pd.DataFrame(texts, columns=[*heads, "GB/s"])


@chart(height=3.4)
def bandwidth(figure, rows: pd.DataFrame):
    """Draw bus bandwidth against size: NCCL back to back and synchronized, and gloo, between two
    ranks."""
    sums = pick(rows, operation="all_reduce", dtype="fp32", world_size=2)
    nccl, gloo = pick(sums, backend="nccl"), pick(sums, backend="gloo")
    back_to_back = nccl.assign(way="queued", rate=nccl["bus_queued"])
    synchronized = nccl.assign(way="isolated", rate=nccl["bus"])
    shown = pd.concat([back_to_back, synchronized, gloo.assign(way="gloo", rate=gloo["bus"])])
    line = fitted(rows)
    ax = figure.subplots()
    ends = lines(ax, shown, "size", "rate", "way", LOOKS)
    doubling_axis(ax)
    log_values(ax)
    ax.set(xlabel="bytes of the tensor", ylabel="bus bandwidth, GB/s", ylim=(0.05, 900))
    reference(ax, link(), "the link, one way")
    reference(ax, line.half_size, "half speed", vertical=True)
    name_ends(figure, ends, LOOKS)


@chart(height=1.7)
def parts(figure, line: Line):
    """Draw overhead and bytes of three all-reduces, as shares of their time."""
    ax = figure.subplots()
    sizes = {"1 MiB": MIB, "10 MiB": 10 * MIB, "100 MiB": 100 * MIB}
    shares = [line.overhead_s / line.time_s(size) for size in sizes.values()]
    ax.barh(list(sizes), shares, color="#f0ad78", height=0.6)
    ax.barh(list(sizes), [1 - share for share in shares], left=shares, color="#86b6e6", height=0.6)
    for y, share in enumerate(shares):
        ax.annotate("overhead" if share > 0.2 else "", (0.01, y), va="center")
        ax.annotate("bytes", (0.99, y), va="center", ha="right")
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(xlim=(0, 1), xlabel="share of the time")

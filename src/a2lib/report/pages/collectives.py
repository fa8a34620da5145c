"""Collectives: bandwidths, and the line of overhead and bandwidth through measured times."""

import numpy as np
import pandas as pd

from a2lib.report import data
from a2lib.report.metrics import stated
from a2lib.report.page import one, pick
from a2lib.report.panels import REFERENCE_LINE, doubling_axis, name_ends
from a2lib.report.plots import label, lines, reference
from a2lib.report.style import Look, Looks, chart
from a2lib.report.tables import cells
from a2lib.report.units import digits, percent
from a2lib.theory.latency import Line, fit, wire_share

MIB, GIB = 1 << 20, 1 << 30
HANDOUT = (1 * MIB, 10 * MIB, 100 * MIB, GIB)
HOSTS = ("host of eight H200", "host of six H100")
NAMES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
}
LOOKS = Looks(
    queued=Look("back to back", "#d55e00", "o", ours=True),
    isolated=Look("synchronized", "#0072b2", "^"),
    gloo=Look("gloo", "#808080", "s"),
)


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each row its bus bandwidth, what each rank sends in a ring over the time.

    bus: GB/s of a synchronized call
    bus_queued: GB/s of calls back to back
    """
    calls = zip(rows["operation"], rows["world_size"], strict=True)
    shares = [wire_share(operation, int(ranks)) for operation, ranks in calls]
    sent = rows["size"].astype(float) * shares / 1e6
    return rows.assign(bus=sent / rows["ms"], bus_queued=sent / rows["ms_queued"])


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


def between_two_gpus(rows: pd.DataFrame, operation: str = "all_reduce") -> pd.DataFrame:
    """Return an operation's collectives in fp32 between two GPUs; raise Missing without rows."""
    return pick(rows, operation=operation, backend="nccl", world_size=2, dtype="fp32")


def queued(rows: pd.DataFrame, operation: str = "all_reduce") -> tuple[list, list]:
    """Return bytes and seconds of those collectives back to back."""
    few = between_two_gpus(rows, operation).dropna(subset=["ms_queued"])
    return list(few["size"].astype(float)), list(few["ms_queued"] / 1e3)


def fitted(rows: pd.DataFrame, operation: str = "all_reduce") -> Line:
    """Return the line through the collectives that ``queued`` returns."""
    return fit(*queued(rows, operation))


def misses(rows: pd.DataFrame, operation: str = "all_reduce") -> pd.Series:
    """Return how far each time is from that line, relative, by size."""
    sizes, times_s = queued(rows, operation)
    return pd.Series(fit(sizes, times_s).residuals(sizes, times_s), index=sizes)


def through(rows: pd.DataFrame, small: int, large: int) -> Line:
    """Return the line through the back-to-back all-reduces of two sizes."""
    few, many = call(rows, small), call(rows, large)
    bandwidth = 1e3 * (large - small) / (many.ms_queued - few.ms_queued)
    return Line(few.ms_queued / 1e3 - small / bandwidth, bandwidth)


def link() -> float:
    """Return the data sheet's bandwidth of the published device's links, GB/s in one direction."""
    return stated(data.PUBLISHED, "nvlink_egress")


def handout_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return ms of synchronized all-reduces at the handout's sizes, by backend and ranks."""
    few = pick(rows, operation="all_reduce", dtype="fp32", size=HANDOUT)
    backend = few["backend"].map({"nccl": "NCCL", "gloo": "gloo"})
    few = few.assign(ranks=backend + ", " + few["world_size"].astype(str) + " ranks")
    table = few.pivot(index="ranks", columns="size", values="ms").rename(columns=_mib)
    table["GB/s"] = few[few["size"] == GIB].set_index("ranks")["bus"]
    return table.apply(cells).reset_index()


def _mib(size: int) -> str:
    return f"{size // MIB:,} MiB"


def operations_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return each collective back to back between two GPUs: bus bandwidth of 1 GiB, the line fitted
    to all sizes, its bandwidth as bus bandwidth, and its largest error."""
    table = []
    for operation, name in NAMES.items():
        row = one(between_two_gpus(rows, operation), size=GIB)
        line = fitted(rows, operation)
        bus = line.bandwidth * wire_share(operation, 2) / 1e9
        error = misses(rows, operation).abs().max()
        numbers = digits(row.bus_queued, 3), digits(1e6 * line.overhead_s), digits(bus, 3)
        table.append([name, *numbers, percent(error)])
    heads = ["collective", "1 GiB, GB/s", "o, µs", "w, GB/s", "error"]
    return pd.DataFrame(table, columns=heads)


def hosts_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return ms of published all-reduces by host, GPUs and size, about 1 GB in one column."""
    is_large = rows["size"] > 9e8
    table = rows.assign(size=rows["size"].mask(is_large, GIB))
    table = table.pivot(index=["device", "world_size"], columns="size", values="ms")
    table = table.rename(columns=_mib)
    table["GB/s"] = rows[is_large].set_index(["device", "world_size"])["bus"]
    table = table.apply(cells)
    return table.reset_index().rename(columns={"world_size": "GPUs"})


def beside_line(rows: pd.DataFrame, line: Line) -> pd.Series:
    """Return published times of all-reduces over those of a line, by size and GPUs; ``rows`` are of
    one host, and about 1 GB counts as 1 GiB."""
    over = {}
    for _, row in rows.iterrows():
        sent = row["size"] * wire_share("all_reduce", int(row["world_size"]))
        size = GIB if row["size"] > 9e8 else row["size"]
        over[size, row["world_size"]] = row["ms"] / (1e3 * line.time_s(sent))
    return pd.Series(over).sort_index()


def line_table(over: pd.Series) -> pd.DataFrame:
    """Return what ``beside_line`` returns, a line for each size."""
    table = over.map("{:.2f}".format).unstack()
    heads = {ranks: f"{ranks} GPUs" for ranks in table}
    return table.rename(columns=heads, index=_mib).reset_index(names="size")


def published(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what others published with ``ms`` and ``bus``, from the means where only they are."""
    times = rows["ms"].fillna(rows["ms_mean"])
    return columns(rows.assign(ms=times, ms_queued=float("nan")))


@chart(height=3.4)
def bandwidth(figure, rows: pd.DataFrame, fitted_line: Line):
    """Draw bus bandwidth against size: NCCL back to back, with the line fitted to it, and
    synchronized, and gloo, between two ranks."""
    sums = pick(rows, operation="all_reduce", dtype="fp32", world_size=2)
    nccl, gloo = pick(sums, backend="nccl"), pick(sums, backend="gloo")
    back_to_back = nccl.assign(way="queued", rate=nccl["bus_queued"])
    synchronized = nccl.assign(way="isolated", rate=nccl["bus"])
    shown = pd.concat([back_to_back, synchronized, gloo.assign(way="gloo", rate=gloo["bus"])])
    ax = figure.subplots()
    ends = lines(ax, shown, "size", "rate", "way", LOOKS)
    doubling_axis(ax)
    sizes = np.geomspace(nccl["size"].min(), nccl["size"].max(), 100)
    rates = [size / fitted_line.time_s(size) / 1e9 for size in sizes]
    ax.plot(sizes, rates, ":", color="#202020", linewidth=1.6, zorder=3)
    ax.set(
        xlabel="bytes of the tensor (1M: 1 MiB)",
        ylabel="bus bandwidth, GB/s",
        ylim=(-10, 500),
    )
    reference(ax, link(), "the link, one way")
    ax.vlines(25 * MIB, 0, 400, **REFERENCE_LINE, zorder=1)
    label(ax, "25 MiB", (25 * MIB, 385), (-4, 0), ha="right", va="top")
    name_ends(figure, ends, LOOKS)

"""A sharded optimizer: what each rank holds beside the count, and the update with its exchange."""

import pandas as pd

from a2lib.parallel.owners import CHUNKS
from a2lib.report.metrics import copy_bandwidth
from a2lib.report.page import pick
from a2lib.report.pages import collectives
from a2lib.report.plots import name_lanes, stacks
from a2lib.report.style import Chart, chart
from a2lib.theory.latency import Line, fit
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.sharding import UPDATE_BYTES, Held, pipelined_s
from a2lib.theory.transformer import SIZES, parameter_count

MOMENTS = ("init", "before", "after")
PARTS = {  # a column of bytes, and what the figure calls it
    "parameter_bytes": "weights",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "AdamW's moments",
}
SHADES = dict(zip(PARTS.values(), ("#0072b2", "#a86f00", "#d55e00"), strict=True))


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """The timed rows with ``way``, who averages gradients and how the step is launched."""
    carrier = rows["carrier"].map({"copy_engines": "copy engines", "backend": "NCCL"})
    carrier = carrier.mask(rows["wrapper"] == "torch_ddp", "PyTorch's DDP")
    how = rows["capture"].map({True: "CUDA graph", False: "from Python"})
    return rows.assign(way=how + ", " + carrier)


def held(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """The fullest rank of each moment, with ``counted``, the formula's bytes (of the peak of a
    later step at the moment "step"), without PyTorch's wrapper, which keeps buckets of its own."""
    fullest = rows.sort_values(["present_bytes", "tensor_bytes", "on_rank"])
    names = ("optimizer", "wrapper", "carrier", "model", "precision", "moment")
    key = [c for c in fullest if c in names]
    fullest = fullest[fullest["wrapper"] != "torch_ddp"].drop_duplicates(key, keep="last")
    return fullest.assign(counted=[_counted(row) for row in fullest.itertuples()])


def _counted(row) -> int:
    how = {"precision": row.precision, "attention": row.attention}
    step = StepMemory(SIZES[row.model], int(row.batch), int(row.context), **how)
    count = Held(step, int(row.world_size), row.optimizer != "plain")
    return count.peak() if row.moment == "step" else sum(count.at(row.moment).values())


def estimate(model: str, ceiling: pd.DataFrame, messages: pd.DataFrame) -> dict[str, float]:
    """Milliseconds of an update of all weights, of a half, of the exchange of the other half, and
    of half an update with its exchange in chunks, at the bandwidth of copies and of all-gathers."""
    weights = parameter_count(SIZES[model])
    update = UPDATE_BYTES * weights / copy_bandwidth(ceiling) / 1e9
    exchange = 1e3 * CHUNKS * gathers(messages).time_s(4 * weights / CHUNKS)
    return {
        "whole": update,
        "half": update / 2,
        "exchange": exchange,
        "both": 1e3 * pipelined_s(update / 2e3, exchange / 1e3, CHUNKS),
    }


def gathers(messages: pd.DataFrame) -> Line:
    """The line through queued all-gathers between two GPUs."""
    return fit(*collectives.queued(messages, "all_gather"))


def memory(rows: pd.DataFrame) -> Chart:
    """What a GPU holds at three moments of the first step, without sharding and with it, GB."""
    words = {"init": "model made", "before": "before update", "after": "after update"}
    parts, totals = {}, []
    for moment, named in words.items():
        for optimizer, how in (("plain", "whole"), ("sharded", "sharded")):
            row = pick(rows, moment=moment, optimizer=optimizer).iloc[0]
            parts[f"{named}, {how}"] = {name: row[c] / 1e9 for c, name in PARTS.items()}
            totals.append(f"{row['present_bytes'] / 1e9:.0f}")
    looks = {"columns": 3, "text": totals, "xlabel": "GB on each of two GPUs"}
    return stacks(pd.DataFrame(parts).T, SHADES, 3.3, **looks)


@chart(height=2.0)
def timeline(figure, at: dict[str, float]):
    """Half an update in chunks above, the all-gather of each below, and a whole update."""
    ax = figure.subplots()
    update, gather = at["half"] / CHUNKS, at["exchange"] / CHUNKS
    free = 0.0
    ax.barh(0, at["whole"], color="#808080", height=0.6)
    for n in range(CHUNKS):
        start = max(free, (n + 1) * update)
        free = start + gather
        ax.barh(1, update, left=n * update, color="#d55e00", height=0.6, edgecolor="#ffffff")
        ax.barh(2, gather, left=start, color="#0072b2", height=0.6, edgecolor="#ffffff")
    name_lanes(ax, range(3), ["whole update", "half an update", "all-gathers"])
    ax.invert_yaxis()
    ax.set(xlabel="ms, estimated", xlim=(0, None))

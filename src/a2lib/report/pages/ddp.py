"""Data parallelism: what communication adds to a step, by transport and schedule, and why."""

import statistics

import numpy as np
import pandas as pd

from a2lib.lab import bulk
from a2lib.report import traces
from a2lib.report.page import one
from a2lib.report.pages import collectives
from a2lib.report.pages.benchmark import TITLES
from a2lib.report.panels import REFERENCE_LINE
from a2lib.report.plots import HEAT, label, lying, name_lanes
from a2lib.report.style import COLOURS, DIM, chart
from a2lib.report.tables import cells
from a2lib.report.units import digits, percent, span, us
from a2lib.shapes import SIZES
from a2lib.theory.buckets import (
    arrivals,
    block_by_block,
    curve,
    fill,
    gradients,
    overhead_s,
    simulate,
)
from a2lib.theory.transformer import parameter_count

MB = 1 << 20
SENT, UPDATE, MATMUL, ATTENTION = "communication", "optimizer", "matmul", "attention"
CONFIGURATION = ["wrapper", "bucket_mb", "carrier", "sent_dtype", "model", "precision"]
WORDS = {  # a wrapper of the rows, in words
    "naive": "after backward, per parameter",
    "flat": "after backward, one all-reduce",
    "overlapped": "overlapped, per parameter",
    "bucketed": "overlapped, {} MiB",
    "updating": "overlapped, {} MiB, AdamW per bucket",
    "torch_ddp": "PyTorch's DDP",
    "torch_ddp_view": "PyTorch's DDP, gradients as views",
}


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each row what communication costs.

    base: ms of the same step without communication, which updates beside the backward if this one
        does
    exposed: ms that the step takes longer than that
    alone: ms of its communication with nothing else running; measured in the step that is launched
        from Python, also for a step in a CUDA graph
    paid: exposed as a share of alone
    way: the configuration in words
    overlapped: of a traced step, the share of the communication that has other kernels beside it
    block_us, usual_us, low, high, tail_us: of a traced step in a CUDA graph, see ``stretched``
    """
    rows = rows.copy()
    updating = rows["wrapper"] == "updating"
    rows["base"] = rows["ms_without"].mask(updating, rows["ms_without_updating"])
    rows["exposed"] = rows["ms"] - rows["base"]
    alone = rows[~rows["capture"]].set_index(CONFIGURATION)["ms_communication"]
    rows["alone"] = rows[CONFIGURATION].join(alone, on=CONFIGURATION)["ms_communication"]
    rows["paid"] = rows["exposed"] / rows["alone"]
    rows["way"] = [in_words(row) for row in rows.itertuples()]
    strips = traces.pictures("strip", rows)
    windows = {row.Index: strip_of(row, strips) for row in rows.itertuples()}
    rows["overlapped"] = [_overlapped(window) for window in windows.values()]
    return rows.join(pd.DataFrame(_stretches(rows, windows)).T.astype(float))


def in_words(row) -> str:
    """Return a row's wrapper, and its transport and sent dtype where they are not the usual."""
    words = WORDS.get(row.wrapper, row.wrapper).format(row.bucket_mb)
    if row.carrier == "copy_engines":
        words += ", copy engines"
    if row.sent_dtype == "bf16":
        words += ", sent in bf16"
    return words


def step(
    rows: pd.DataFrame,
    wrapper: str = "bucketed",
    bucket_mb: int = 0,
    *,
    model: str = "xl25",
    carrier: str = "backend",
    capture: bool = True,
    sent_dtype: str = "fp32",
    precision: str = "bf16",
):
    """Return the row of one step; ``bucket_mb`` is 0 where there are no buckets."""
    return one(
        rows,
        wrapper=wrapper,
        bucket_mb=bucket_mb,
        model=model,
        carrier=carrier,
        capture=capture,
        sent_dtype=sent_dtype,
        precision=precision,
    )


def strip_of(row, strips: dict[str, bulk.Picture]) -> list[dict]:
    """Return the window of a row's trace; empty where it was not traced."""
    of_ddp = {name: strip for name, strip in strips.items() if strip.about.get("section") == "ddp"}
    return traces.traced(row, of_ddp)


def _overlapped(rows: list[dict]) -> float | None:
    sent = [row for row in rows if row["kind"] == SENT]
    others = [row for row in rows if row["kind"] != SENT and row["stream"] != traces.HOST]
    total = sum(end - start for start, end in traces.union(sent))
    return traces.overlap_us(sent, others) / total if total else None


def _stretches(rows: pd.DataFrame, windows: dict[int, list[dict]]) -> dict[int, dict[str, float]]:
    """Return ``stretched`` of each traced step in a CUDA graph, by the row's index."""
    rows = rows.loc[[index for index, window in windows.items() if window]]
    rows = rows[rows["precision"] == "bf16"]
    captured = rows[rows["capture"]]
    after_backward, nccl = rows["wrapper"] == "naive", captured["carrier"] == "backend"
    if not (after_backward.any() and nccl.any()):
        return {}
    kinds = block_kinds(windows[nccl.idxmax()])
    plain = windows[after_backward.idxmax()]
    return {index: stretched(windows[index], plain, kinds) for index in captured.index}


def block_kinds(traced: list[dict]) -> list[str]:
    """Return the kinds of a block's backward kernels: what repeats three times at the end."""
    kinds = [row["kind"] for row in _computing(traced)]
    for n in range(4, len(kinds) // 3 + 1):
        if kinds[-n:] == kinds[-2 * n : -n] == kinds[-3 * n : -2 * n]:
            return kinds[-n:]
    raise ValueError("the trace shows no three blocks alike")


def stretched(traced: list[dict], plain: list[dict], kinds: list[str]) -> dict[str, float]:
    """Return what communication costs the kernels of a block's backward (of these ``kinds``).

    block_us: us that they take in ``traced``, beside communication
    usual_us: us that they take in ``plain``, which communicates after the backward
    low, high: the least and the most, over the matmuls of a block, of how many times as long one
        takes with a collective beside it from begin to end
    tail_us: us of communication between the last matmul and the update, with nothing beside it
    """
    kernels, plain_kernels = _computing(traced), _computing(plain)
    blocks, usual_blocks = _blocks(kernels, kinds), _blocks(plain_kernels, kinds)
    usual = [
        statistics.median(block[i]["duration_us"] for block in usual_blocks)
        for i in range(len(kinds))
    ]
    sent = [row for row in traced if row["kind"] == SENT]
    factors = []
    for i, kind in enumerate(kinds):
        slow = [block[i]["duration_us"] for block in blocks if _all_along(block[i], sent)]
        if kind == MATMUL and slow:
            factors.append(statistics.mean(slow) / usual[i])
    last = traces.end_us(kernels[-1])
    update = min((row["start_us"] for row in traced if row["kind"] == UPDATE), default=last)
    window = {"start_us": last, "duration_us": max(0.0, update - last)}
    busy = traces.overlap_us([window], _before_update(traced))
    block_times = [sum(row["duration_us"] for row in block) for block in blocks]
    return {
        "block_us": statistics.mean(block_times),
        "usual_us": sum(usual),
        "low": min(factors),
        "high": max(factors),
        "tail_us": window["duration_us"] - busy,
    }


def _all_along(kernel: dict, sent: list[dict]) -> bool:
    return traces.overlap_us([kernel], sent) > 0.99 * kernel["duration_us"]


def _before_update(rows: list[dict]) -> list[dict]:
    begin = min((row["start_us"] for row in rows if row["kind"] == UPDATE), default=float("inf"))
    computing = [row for row in rows if row["kind"] not in (SENT, UPDATE, "other")]
    return [row for row in computing if row["start_us"] < begin and row["stream"] != traces.HOST]


def _computing(rows: list[dict]) -> list[dict]:
    """Return, in order, the kernels of the backward up to its last matmul."""
    kernels = sorted(_before_update(rows), key=lambda row: row["start_us"])
    while kernels and kernels[-1]["kind"] != MATMUL:
        kernels.pop()
    return kernels


def _blocks(rows: list[dict], kinds: list[str]) -> list[list[dict]]:
    """Return the runs of kernels of these kinds, from the end."""
    blocks, end = [], len(rows)
    while end >= len(kinds):
        piece = rows[end - len(kinds) : end]
        if [row["kind"] for row in piece] == kinds:
            blocks.append(piece)
            end -= len(kinds)
        else:
            end -= 1
    return blocks


def buckets_sent(bucket_mb: float) -> int:
    """Return the number of all-reduces of the 2.0B model's step: a parameter that is larger than a
    bucket has one of its own."""
    sizes = [4.0 * gradient.elements for gradient in gradients(SIZES["xl25"])]
    return len(list(fill(sizes, bucket_mb * MB)))


def formula_ms(bucket_mb: float, messages: pd.DataFrame) -> float:
    """Return ms that the handout's formula leaves exposed: the buckets that are sent, taken as
    equal, after a backward that takes as long as their bytes travel."""
    size = 4 * parameter_count(SIZES["xl25"])
    return 1e3 * overhead_s(size, buckets_sent(bucket_mb), collectives.fitted(messages))


def simulated_ms(bucket_mb: float, backward_ms: float, messages: pd.DataFrame) -> float:
    """Return ms that one link leaves exposed after a backward of that length: gradients arrive
    block by block, and collectives take as long as measured back to back."""
    sizes = gradients(SIZES["xl25"])
    ready = block_by_block(arrivals(sizes, backward_ms / 1e3), SIZES["xl25"].num_layers)
    cost = curve(*collectives.queued(messages))
    bytes_sent = [4.0 * gradient.elements for gradient in sizes]
    return 1e3 * simulate(bytes_sent, ready, bucket_mb * MB, cost)


@chart(height=3.4)
def ladder(figure, steps: dict[str, float], marks: dict[str, float]):
    """Draw the step after each change: a bar from zero, and pale what it takes off the one above.
    ``marks`` are two dashed lines across all bars, by their words."""
    ax, at, times = figure.subplots(), range(len(steps)), np.array([*steps.values()])
    ax.barh(at, times, color=COLOURS[1], height=0.62)
    saved = np.maximum(-np.diff(times, prepend=times[0]), 0)
    ax.barh(at, saved, left=times, color=HEAT[5], height=0.62)
    for y, time in enumerate(times):
        label(ax, f"{time:.0f}", (0, y), (6, 0), va="center", color="#ffffff")
    lying(ax, steps, times.max(), "ms per step")
    ax.set_ylim(top=-1.3)
    for words, value in marks.items():
        ax.axvline(value, **REFERENCE_LINE, zorder=3)
        is_left = value == min(marks.values())  # its words leave room for those of the next
        by, side = ((-4, 0), "right") if is_left else ((4, 0), "left")
        label(ax, words, (value, -0.85), by, color=DIM, ha=side)


@chart(height=3.2)
def paid(figure, rows: pd.DataFrame):
    """Draw exposed time, and ``simulated``, against the stand-alone time, by bucket size."""
    at = {1000: (-8, 9), 400: (4, -13), 100: (6, -10), 25: (2, -14), 10: (-18, 7), 1: (8, -9)}
    ax = figure.subplots()
    ax.plot([20, 40], [10, 20], color=COLOURS[4], linewidth=1)
    ax.annotate("half of it", (26.5, 14.2), rotation=19)
    ax.plot(rows["alone"], rows["exposed"], "o", color=COLOURS[0], markersize=6)
    ax.plot(rows["alone"], rows["simulated"], "s", color=COLOURS[1], markersize=5)
    for row in rows.itertuples():
        label(ax, str(row.bucket_mb), (row.alone, row.exposed), at.get(row.bucket_mb, (6, -10)))
    ax.annotate("measured", (29.5, 11), color=COLOURS[0])
    ax.annotate("simulated", (29.5, 2.2), color=COLOURS[1])
    ax.set(xlim=(20, 40), ylim=(0, 21), xticks=range(20, 41, 5), yticks=range(0, 21, 5))
    ax.set(xlabel="communication with nothing else running, ms", ylabel="exposed, ms")


@chart(height=2.4)
def schedules(figure):
    """Draw three schedules of backward, communication and update, to no scale."""
    after, during, tail = [(0, 6)], [(1.2, 1.2), (2.4, 1.2), (3.6, 1.2), (6, 1)], [(7, 2.8)]
    per_bucket = [(2.5, 0.7), (3.7, 0.7), (4.9, 0.7), (7, 0.7)]
    lanes_of = {
        "after the backward": (after, [(6, 4)], [(10, 2.8)]),
        "overlapped": (after, during, tail),
        "and update per bucket": (after, during, per_bucket),
    }
    ax = figure.subplots()
    for y, lanes in enumerate(lanes_of.values()):
        colours = (COLOURS[4], COLOURS[1], COLOURS[0])
        for lane, (bars, colour) in enumerate(zip(lanes, colours, strict=True)):
            ax.broken_barh(bars, (y + 0.26 * lane, 0.24), facecolor=colour, edgecolor="#ffffff")
    for words, x, lane in (("backward", 0.1, 0), ("all-reduce", 6.1, 1), ("AdamW", 10.1, 2)):
        ax.annotate(words, (x, 0.12 + 0.26 * lane), va="center", color="#ffffff")
    name_lanes(ax, [0.38, 1.38, 2.38], list(lanes_of))
    ax.set(xlim=(0, 13), ylim=(2.9, -0.1), xticks=[], xlabel="time")


KERNEL_COLOURS = {
    "matmuls": COLOURS[1],
    "attention": COLOURS[0],
    "others": HEAT[5],
    "collectives": COLOURS[4],
}


@chart(height=3.2)
def lanes(figure, shown: dict[str, list[dict]], before_us: float, after_us: float):
    """Draw traces around the end of the backward, one below the other: what computes, and below it
    the collectives. Where the blocks of the backward are alike, brackets show one of them."""
    axes = figure.subplots(len(shown), 1, sharex=True, sharey=True)
    for ax, (title, rows) in zip(axes, shown.items(), strict=True):
        kernels = around_the_end(rows, before_us, after_us)
        origin = max(traces.end_us(row) for row in kernels if row["kind"] == MATMUL)
        for row in kernels:
            y, colour = _lane_of(row["kind"])
            bar = [((row["start_us"] - origin) / 1e3, row["duration_us"] / 1e3)]
            ax.broken_barh(bar, (y, 0.8), facecolor=KERNEL_COLOURS[colour], linewidth=0)
        block = _middle_block(kernels)
        if block is not None:
            start, end = ((time - origin) / 1e3 for time in block)
            looks = {"arrowstyle": "|-|, widthA=0.25, widthB=0.25", "linewidth": 1.2}
            ax.annotate("", (start, 2.15), (end, 2.15), arrowprops=looks)
            words = f"a block, {us((end - start), 3)}"
            label(ax, words, ((start + end) / 2, 2.2), (0, 3), ha="center")
        name_lanes(ax, [1.5, 0.5], ["computes", "sends"])
        ax.set_title(title, loc="left", fontsize=10.5)
        ax.set(ylim=(0, 2.75 if block is not None else 2.05))
    axes[-1].set_xlabel("ms from the end of the backward")
    traces.legend(figure, KERNEL_COLOURS, columns=4)


def _lane_of(kind: str) -> tuple[float, str]:
    if kind == SENT:
        return 0.1, "collectives"
    names = {MATMUL: "matmuls", ATTENTION: "attention"}
    return 1.1, names.get(kind, "others")


def _middle_block(kernels: list[dict]) -> tuple[float, float] | None:
    """Return begin and end of a block's backward, from one attention to the next, in the middle of
    what is shown; None where fewer than three begin."""
    begins = [row["start_us"] for row in kernels if row["kind"] == ATTENTION]
    begins = [time for n, time in enumerate(begins) if not n or time - begins[n - 1] > 200]
    if len(begins) < 3:
        return None
    middle = len(begins) // 2
    return begins[middle - 1], begins[middle]


def around_the_end(rows: list[dict], before: float, after: float) -> list[dict]:
    """Return a strip's kernels around the end of the backward's last matmul, in microseconds."""
    end = max(traces.end_us(row) for row in rows if row["kind"] == MATMUL)
    on_gpu = [row for row in rows if row["stream"] != traces.HOST]
    return traces.cropped(on_gpu, end - before, end + after)


def sweep(rows, backward_ms: float, messages: pd.DataFrame) -> pd.DataFrame:
    """Return steps by bucket size as a table, with what the formula and the simulation expect."""
    lines = []
    for row in rows:
        expected = [formula_ms(row.bucket_mb, messages)]
        expected.append(simulated_ms(row.bucket_mb, backward_ms, messages))
        measured = [row.exposed, row.alone]
        numbers = cells((*expected, *measured))
        sent = buckets_sent(row.bucket_mb)
        lines.append([row.bucket_mb, sent, *numbers, digits(row.paid)])
    heads = ["MiB", "sent", "formula", "simulated", "measured", "alone", "share"]
    return pd.DataFrame(lines, columns=heads)


def exposed_shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what buckets of 100 MiB over NCCL expose, by model and precision."""
    lines = []
    for model, precision, capture in (
        ("xl25", "bf16", True),
        ("2.7B", "bf16", True),
        ("xl25", "fp32", False),
        ("2.7B", "fp32", False),
    ):
        row = step(rows, "bucketed", 100, model=model, precision=precision, capture=capture)
        launch = "graph" if capture else "Python"
        numbers = cells((row.base, row.exposed, row.alone))
        lines.append([f"{TITLES[model]}, {precision}, {launch}", *numbers, digits(row.paid)])
    heads = ["model", "one GPU", "exposed", "alone", "share"]
    return pd.DataFrame(lines, columns=heads)


def handout_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return steps launched from Python as a table: what each exposes, and its share."""
    rows = rows.sort_values(["model", "ms"], ascending=[False, False])
    return pd.DataFrame(
        {
            "model": rows["model"].map(TITLES),
            "communication": rows["way"],
            "step": cells(rows["ms"]),
            "exposed": cells(rows["exposed"]),
            "of the step": (rows["exposed"] / rows["ms"]).map(percent),
            "alone": cells(rows["alone"]),
        }
    )


def handout_buckets(rows: pd.DataFrame) -> pd.DataFrame:
    """Return steps launched from Python as a table: a line per bucket size, a column per model and
    precision."""
    settings = (("xl25", "fp32"), ("2.7B", "fp32"), ("xl25", "bf16"), ("2.7B", "bf16"))
    lines = {"per parameter": ("overlapped", 0)}
    lines |= {f"{size} MiB": ("bucketed", size) for size in (1, 10, 100, 1000)}
    table = pd.DataFrame({"bucket": list(lines)})
    for model, precision in settings:
        setting = {"model": model, "precision": precision, "capture": False}
        table[f"{TITLES[model]}, {precision}"] = [
            digits(step(rows, wrapper, size, **setting).ms, 3) for wrapper, size in lines.values()
        ]
    return table


def every_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Return every timed step as text."""
    rows = rows[rows["status"] == "ok"].sort_values(["model", "precision", "capture", "ms"])
    ranges = zip(rows["ms_p20"], rows["ms_p80"], strict=True)
    return pd.DataFrame(
        {
            "model": rows["model"].map(TITLES),
            "mode": rows["precision"] + rows["capture"].map({True: ", graph", False: ", Python"}),
            "communication": rows["way"],
            "step": cells(rows["ms"]),
            "20 to 80 %": [span(pair, digits, 3) for pair in ranges],
            "one GPU": cells(rows["base"]),
            "exposed": cells(rows["exposed"]),
            "alone": cells(rows["alone"]),
            "launching": cells(rows["ms_host"]),
        }
    )


def published_table(others: pd.DataFrame) -> pd.DataFrame:
    """Return what others published, as text."""
    table = others[["device", "model", "wrapper", "bucket_mb", "context"]]
    table = table.replace({"model": TITLES}).rename(columns={"bucket_mb": "bucket, MB"})
    table["step, ms"] = cells(others["ms_mean"])
    table["communication, ms"] = cells(others["ms_communication"])
    return table

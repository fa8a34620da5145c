"""Data parallelism: what messages add to a step, by who carries them and when, and why."""

import statistics

import numpy as np
import pandas as pd

from a2lib.lab import bulk
from a2lib.report import traces
from a2lib.report.pages import collectives
from a2lib.report.panels import REFERENCE_LINE
from a2lib.report.plots import HEAT, label, lying, name_lanes
from a2lib.report.style import COLOURS, DIM, chart
from a2lib.report.units import digits, ms, percent
from a2lib.theory.buckets import arrivals, block_by_block, curve, gradients, overhead_s, simulate
from a2lib.theory.transformer import SIZES, parameter_count

MB = 1 << 20
SENT, UPDATE, MATMUL = "communication", "optimizer", "matmul"
WAY = ["wrapper", "bucket_mb", "carrier", "sent_dtype", "model", "precision"]
MODELS = {"xl25": "2.0B", "2.7B": "3.4B"}
WORDS = {
    "naive": "after backward, one by one",
    "flat": "after backward, all in one",
    "overlapped": "one by one",
    "bucketed": "buckets of {} MiB",
    "updating": "buckets of {} MiB, AdamW per bucket",
    "torch_ddp": "PyTorch's DDP",
    "torch_ddp_view": "PyTorch's DDP, gradients as views",
}


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """The rows with ``base``, the same step without messages (one that updates beside backward, if
    this one does), and ``exposed``, the step less that; ``alone``, the messages with nothing else
    running (of the launched row of the same way); ``paid``, the share of these that is exposed;
    ``way`` in words; of steps that were traced ``overlapped``, the share of their messages with
    other kernels running; and of those in a CUDA graph what ``stretched`` says."""
    rows = rows.copy()
    updating = rows["wrapper"] == "updating"
    rows["base"] = rows["ms_without"].mask(updating, rows["ms_without_updating"])
    rows["exposed"] = rows["ms"] - rows["base"]
    alone = rows[~rows["capture"]].set_index(WAY)["ms_communication"]
    rows["alone"] = rows[WAY].join(alone, on=WAY)["ms_communication"]
    rows["paid"] = rows["exposed"] / rows["alone"]
    rows["way"] = [
        WORDS.get(r.wrapper, r.wrapper).format(r.bucket_mb)
        + {"copy_engines": ", copy engines"}.get(r.carrier, "")
        + {"bf16": ", in bf16"}.get(r.sent_dtype, "")
        for r in rows.itertuples()
    ]
    strips = traces.pictures("strip", rows)
    windows = {r.Index: strip_of(r, strips) for r in rows.itertuples()}
    rows["overlapped"] = list(map(_overlapped, windows.values()))
    return rows.join(pd.DataFrame(_stretches(rows, windows)).T.astype(float))


def strip_of(row, strips: dict[str, bulk.Picture]) -> list[dict]:
    """The window of a row's trace; empty where it was not traced."""
    own = {name: one for name, one in strips.items() if one.about.get("section") == "ddp"}
    return traces.traced(row, own)


def _overlapped(rows: list[dict]) -> float | None:
    sent = [r for r in rows if r["kind"] == SENT]
    others = [r for r in rows if r["kind"] != SENT and r["stream"] != traces.HOST]
    total = sum(end - start for start, end in traces.union(sent))
    return traces.overlap_us(sent, others) / total if total else None


def _stretches(rows: pd.DataFrame, windows: dict[int, list[dict]]) -> dict[int, dict[str, float]]:
    """What ``stretched`` says of each traced step in a CUDA graph, by the row's index, as the
    ``windows`` are that the traces have."""
    rows = rows.loc[[n for n, window in windows.items() if window]]
    rows = rows[rows["precision"] == "bf16"]
    captured = rows[rows["capture"]]
    whole, nccl = rows["wrapper"] == "naive", captured["carrier"] == "backend"
    if not (whole.any() and nccl.any()):
        return {}
    kinds = block_kinds(windows[nccl.idxmax()])
    return {n: stretched(windows[n], windows[whole.idxmax()], kinds) for n in captured.index}


def block_kinds(traced: list[dict]) -> list[str]:
    """The kinds of the kernels of a block's backward: what repeats three times at its end."""
    kinds = [r["kind"] for r in _computing(traced)]
    for n in range(4, len(kinds) // 3 + 1):
        if kinds[-n:] == kinds[-2 * n : -n] == kinds[-3 * n : -2 * n]:
            return kinds[-n:]
    raise ValueError("the trace shows no three blocks alike")


def stretched(traced: list[dict], whole: list[dict], kinds: list[str]) -> dict[str, float]:
    """What messages cost the kernels of a block's backward (of these ``kinds``).

    ``block_us`` is what they take in a trace with messages, ``usual_us`` in one that sends after
    backward; ``low`` and ``high`` are the least and the most of how many times as long a matrix
    multiply takes with a message all along, and ``tail_us`` is what messages take between the last
    multiply and the update with nothing else running.
    """
    kernels, plain = _computing(traced), _computing(whole)
    ours, alone = _blocks(kernels, kinds), _blocks(plain, kinds)
    usual = [statistics.median(b[i]["duration_us"] for b in alone) for i in range(len(kinds))]
    sent = [r for r in traced if r["kind"] == SENT]
    factors = []
    for i, kind in enumerate(kinds):
        slow = [b[i]["duration_us"] for b in ours if _all_along(b[i], sent)]
        if kind == MATMUL and slow:
            factors.append(statistics.mean(slow) / usual[i])
    last = kernels[-1]["start_us"] + kernels[-1]["duration_us"]
    update = min((r["start_us"] for r in traced if r["kind"] == UPDATE), default=last)
    window = {"start_us": last, "duration_us": max(0.0, update - last)}
    busy = traces.overlap_us([window], _before_update(traced))
    return {
        "block_us": statistics.mean(sum(r["duration_us"] for r in b) for b in ours),
        "usual_us": sum(usual),
        "low": min(factors),
        "high": max(factors),
        "tail_us": window["duration_us"] - busy,
    }


def _all_along(kernel: dict, sent: list[dict]) -> bool:
    return traces.overlap_us([kernel], sent) > 0.99 * kernel["duration_us"]


def _before_update(rows: list[dict]) -> list[dict]:
    begin = min((r["start_us"] for r in rows if r["kind"] == UPDATE), default=float("inf"))
    found = [r for r in rows if r["kind"] not in (SENT, UPDATE, "other")]
    return [r for r in found if r["start_us"] < begin and r["stream"] != traces.HOST]


def _computing(rows: list[dict]) -> list[dict]:
    """In order, the kernels of backward up to its last matrix multiply."""
    found = sorted(_before_update(rows), key=lambda r: r["start_us"])
    while found and found[-1]["kind"] != MATMUL:
        found.pop()
    return found


def _blocks(rows: list[dict], kinds: list[str]) -> list[list[dict]]:
    found, end = [], len(rows)
    while end >= len(kinds):
        piece = rows[end - len(kinds) : end]
        if [r["kind"] for r in piece] == kinds:
            found.append(piece)
            end -= len(kinds)
        else:
            end -= 1
    return found


def formula_ms(bucket_mb: float, messages: pd.DataFrame) -> float:
    """What n equal buckets of xl25 leave after a backward that takes as long as their bytes."""
    size = 4 * parameter_count(SIZES["xl25"])
    return 1e3 * overhead_s(size, max(1.0, size / bucket_mb / MB), collectives.fitted(messages))


def simulated_ms(bucket_mb: float, backward_ms: float, messages: pd.DataFrame) -> float:
    """What one link leaves after a backward of xl25 of that length, gradients block by block,
    messages as long as measured queued ones."""
    made = gradients(SIZES["xl25"])
    ready = block_by_block(arrivals(made, backward_ms / 1e3), SIZES["xl25"].num_layers)
    cost = curve(*collectives.queued(messages))
    return 1e3 * simulate([4.0 * g.elements for g in made], ready, bucket_mb * MB, cost)


@chart(height=3.4)
def ladder(figure, steps: dict[str, float], marks: dict[str, float]):
    """The step by each way, from the naive one down: a bar from zero, and pale what it takes off
    the one above it. ``marks`` are two dashed lines across all bars, by their words."""
    ax, at, took = figure.subplots(), range(len(steps)), np.array([*steps.values()])
    ax.barh(at, took, color=COLOURS[1], height=0.62)
    saved = np.maximum(-np.diff(took, prepend=took[0]), 0)
    ax.barh(at, saved, left=took, color=HEAT[5], height=0.62)
    for y, time in enumerate(took):
        label(ax, f"{time:.0f}", (0, y), (6, 0), va="center", color="#ffffff")
    lying(ax, steps, took.max(), "ms a step")
    ax.set_ylim(top=-1.3)
    for words, value in marks.items():
        ax.axvline(value, **REFERENCE_LINE, zorder=3)
        left = value == min(marks.values())  # room for the words of the next
        side = {"by": (-4, 0), "ha": "right"} if left else {"by": (4, 0)}
        label(ax, words, (value, -0.85), color=DIM, **side)


@chart(height=3.2)
def paid(figure, rows: pd.DataFrame):
    """Exposed time, and ``simulated``, against the messages' time with nothing else running, by
    bucket."""
    at = {1000: (-8, 9), 400: (4, -13), 100: (6, -10), 25: (2, -14), 10: (-18, 7), 1: (8, -9)}
    ax = figure.subplots()
    ax.plot([20, 40], [10, 20], color=COLOURS[4], linewidth=1)
    ax.annotate("half of it", (26.5, 14.2), rotation=19)
    ax.plot(rows["alone"], rows["exposed"], "o", color=COLOURS[0], markersize=6)
    ax.plot(rows["alone"], rows["simulated"], "s", color=COLOURS[1], markersize=5)
    for r in rows.itertuples():
        label(ax, str(r.bucket_mb), (r.alone, r.exposed), at.get(r.bucket_mb, (6, -10)))
    ax.annotate("measured", (29.5, 11), color=COLOURS[0])
    ax.annotate("simulated", (29.5, 2.2), color=COLOURS[1])
    ax.set(xlim=(20, 40), ylim=(0, 21), xticks=range(20, 41, 5), yticks=range(0, 21, 5))
    ax.set(xlabel="messages with nothing else running, ms", ylabel="added to the step, ms")


@chart(height=2.4)
def schedules(figure):
    """Three schedules of backward, messages and update, drawn to no scale."""
    ways = {
        "after backward": ([(0, 6)], [(6, 4)], [(10, 2.8)]),
        "during backward": ([(0, 6)], [(1.2, 1.2), (2.4, 1.2), (3.6, 1.2), (6, 1)], [(7, 2.8)]),
        "and update per bucket": (
            [(0, 6)],
            [(1.2, 1.2), (2.4, 1.2), (3.6, 1.2), (6, 1)],
            [(2.5, 0.7), (3.7, 0.7), (4.9, 0.7), (7, 0.7)],
        ),
    }
    ax = figure.subplots()
    for y, lanes in enumerate(ways.values()):
        colours = (COLOURS[4], COLOURS[1], COLOURS[0])
        for lane, (bars, colour) in enumerate(zip(lanes, colours, strict=True)):
            ax.broken_barh(bars, (y + 0.26 * lane, 0.24), facecolor=colour, edgecolor="#ffffff")
    for words, x, lane in (("backward", 0.1, 0), ("messages", 6.1, 1), ("AdamW", 10.1, 2)):
        ax.annotate(words, (x, 0.12 + 0.26 * lane), va="center", color="#ffffff")
    name_lanes(ax, [0.38, 1.38, 2.38], list(ways))
    ax.set(xlim=(0, 13), ylim=(2.9, -0.1), xticks=[], xlabel="time")


def around_the_end(rows: list[dict], before: float = 5000, after: float = 1500) -> list[dict]:
    """Of a strip's kernels those around the end of backward's last multiply, in microseconds."""
    end = max(r["start_us"] + r["duration_us"] for r in rows if r["kind"] == MATMUL)
    few = [r for r in rows if end - before < r["start_us"] < end + after]
    few = [r for r in few if r["stream"] != traces.HOST]
    return [r | {"duration_us": min(r["duration_us"], end + after - r["start_us"])} for r in few]


def sweep(rows, backward_ms: float, messages: pd.DataFrame) -> pd.DataFrame:
    """Steps by bucket size as a table: exposed by the formula, simulated and measured."""
    lines = [
        [f"{r.bucket_mb} MiB", digits(formula_ms(r.bucket_mb, messages), 3)]
        + [digits(simulated_ms(r.bucket_mb, backward_ms, messages), 3)]
        + [digits(r.exposed, 3), digits(r.alone, 3), digits(r.paid)]
        for r in rows
    ]
    columns = ["bucket", "exposed, formula", "exposed, simulated", "exposed, measured"]
    return pd.DataFrame(lines, columns=[*columns, "messages' own time", "exposed / own"])


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps launched from Python as a table: what each exposes, and its share."""
    rows = rows.sort_values(["model", "ms"], ascending=[False, False])
    return pd.DataFrame(
        {
            "model": rows["model"].map(MODELS),
            "way": rows["way"],
            "step": _times(rows["ms"]),
            "exposed": _times(rows["exposed"]),
            "of the step": (rows["exposed"] / rows["ms"]).map(percent),
            "messages' own time": _times(rows["alone"]),
        }
    )


def every(rows: pd.DataFrame) -> pd.DataFrame:
    """Every timed step as a table."""
    rows = rows[rows["status"] == "ok"].sort_values(["model", "precision", "capture", "ms"])
    low, high = (rows[name].map(lambda t: digits(t, 3)) for name in ("ms_p20", "ms_p80"))
    return pd.DataFrame(
        {
            "model": rows["model"].map(MODELS),
            "precision": rows["precision"],
            "launched": rows["capture"].map({True: "CUDA graph", False: "from Python"}),
            "way": rows["way"],
            "step": _times(rows["ms"]),
            "20 to 80 %": low + " to " + high,
            "one GPU, nothing sent": _times(rows["base"]),
            "exposed": _times(rows["exposed"]),
            "messages' own time": _times(rows["alone"]),
            "to launch it": _times(rows["ms_host"]),
        }
    )


def _times(times: pd.Series) -> pd.Series:
    return times.map(lambda t: ms(t, 3), na_action="ignore")

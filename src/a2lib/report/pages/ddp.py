"""Data parallelism: what communication adds to a step, by transport and schedule, and why."""

from collections import defaultdict
from itertools import pairwise
from statistics import mean, median

import pandas as pd

from a2lib.lab import bulk
from a2lib.report import traces
from a2lib.report.page import Missing, one
from a2lib.report.pages.benchmark import TITLES
from a2lib.report.plots import HEAT, label, name_lanes, stacks
from a2lib.report.style import COLOURS, Chart, chart
from a2lib.report.tables import cells
from a2lib.report.units import digits, us
from a2lib.shapes import SIZES
from a2lib.theory.buckets import count_buckets
from a2lib.theory.latency import Line
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.transformer import parameter_count

MB = 1 << 20
SENT, UPDATE, MATMUL, ATTENTION = "communication", "optimizer", "matmul", "attention"
CONFIGURATION = ["wrapper", "bucket_mb", "carrier", "sent_dtype", "model", "precision"]
COPIES = {"carrier": "copy_engines"}
NARROW = {"precision": "bf16_weights", "sent_dtype": "bf16"}  # gradients are sent as they are
CAST = {"carrier": "copy_engines", "sent_dtype": "bf16"}  # fp32 gradients
TRACED = ["overlapped", "low", "high", "tail_us"]
ELEMENTWISE, IDLE = "fused", "idle"


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """Add to each row what communication costs.

    base: ms of the same step without communication, which updates beside the backward if this one
        does
    exposed: ms that the step takes longer than that
    alone: ms of its communication with nothing else running; measured in the step that is launched
        from Python, also for a step in a CUDA graph
    paid: exposed as a share of alone
    overlapped: of a traced step, the share of the communication that has other kernels beside it
    low, high, tail_us: of a traced step in a CUDA graph, see ``stretched``
    """
    rows = rows.copy()
    updating = rows["wrapper"] == "updating"
    rows["base"] = rows["ms_without"].mask(updating, rows["ms_without_updating"])
    rows["exposed"] = rows["ms"] - rows["base"]
    alone = rows[~rows["capture"]].set_index(CONFIGURATION)["ms_communication"]
    rows["alone"] = rows[CONFIGURATION].join(alone, on=CONFIGURATION)["ms_communication"]
    rows["paid"] = rows["exposed"] / rows["alone"]
    return rows.join(_traced(rows))


def _traced(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the columns TRACED of the rows that were traced."""
    strips = traces.pictures("strip", rows)
    windows = {}
    usual = None  # of the step in bf16 that communicates after its backward
    for row in rows.itertuples():
        window = strip_of(row, strips)
        if window:
            windows[row.Index] = window
        if window and usual is None and row.wrapper == "naive" and row.precision == "bf16":
            usual = window
    lines = {}
    for index, window in windows.items():
        line = {"overlapped": overlapped(window)}
        if usual and rows["precision"][index] == "bf16" and rows["capture"][index]:
            line.update(stretched(window, usual))
        lines[index] = line
    return pd.DataFrame.from_dict(lines, orient="index", columns=TRACED)


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
    of_ddp = {}
    for name, strip in strips.items():
        if strip.about.get("section") == "ddp":
            of_ddp[name] = strip
    return traces.traced(row, of_ddp)


def overlapped(rows: list[dict]) -> float:
    """Return the share of the communication of a trace that has other kernels beside it."""
    sent, others = traces.of_kind(rows, SENT), []
    for row in rows:
        if row["kind"] != SENT and row["stream"] != traces.HOST:
            others.append(row)
    return traces.overlap_us(sent, others) / traces.covered_us(sent)


def stretched(traced: list[dict], usual: list[dict]) -> dict[str, float]:
    """Return what communication costs the backward in ``traced``, compared with ``usual``, a trace
    that communicates after the backward.

    low, high: the least and the most, over the matmuls of a block, of how many times as long one
        takes with a collective beside it from begin to end
    tail_us: us from the end of the backward to the update
    """
    sent = traces.of_kind(traced, SENT)
    alone = list(map(matmuls, blocks(usual)))
    number = len(alone[0])
    beside = defaultdict(list)  # durations of each matmul of a block, beside a collective
    for block in map(matmuls, blocks(traced)):
        if len(block) != number:
            continue
        for place, kernel in enumerate(block):
            if _has_all_along(kernel, sent):
                beside[place].append(kernel["duration_us"])
    factors = []
    for place, durations in beside.items():
        usual_us = median(block[place]["duration_us"] for block in alone)
        factors.append(mean(durations) / usual_us)
    update = min(traces.of_kind(traced, UPDATE), key=_start_us)
    return {
        "low": min(factors),
        "high": max(factors),
        "tail_us": update["start_us"] - traces.end_us(backward(traced)[-1]),
    }


def _start_us(kernel: dict) -> float:
    return kernel["start_us"]


def backward(rows: list[dict]) -> list[dict]:
    """Return, in order, the kernels of a trace that compute the backward; a copy of one number
    may follow the last all-reduce."""
    stream = matmuls(rows)[0]["stream"]
    kernels = []
    for row in sorted(rows, key=_start_us):
        if row["kind"] == UPDATE:
            break
        if row["stream"] == stream and row["kind"] not in (SENT, "other", "copy"):
            kernels.append(row)
    return kernels


def blocks(rows: list[dict]) -> list[list[dict]]:
    """Return the backward's kernels block by block, from one attention to the next one, which is
    the last of the list."""
    kernels = backward(rows)
    begins = []
    for n, row in enumerate(kernels):
        follows = n > 0 and kernels[n - 1]["kind"] == ATTENTION  # attention may be two kernels
        if row["kind"] == ATTENTION and not follows:
            begins.append(n)
    return [kernels[begin : end + 1] for begin, end in pairwise(begins)]


def matmuls(kernels: list[dict]) -> list[dict]:
    return traces.of_kind(kernels, MATMUL)


def length_us(block: list[dict]) -> float:
    return block[-1]["start_us"] - block[0]["start_us"]


def block_parts(traced: list[dict]) -> pd.Series:
    """Return the mean us of a block of the backward by kind of kernel, and of none (IDLE)."""
    lines = []
    for block in blocks(traced):
        line = {MATMUL: 0.0, ELEMENTWISE: 0.0, ATTENTION: 0.0}
        for kernel in block[:-1]:  # the last one is the next block's
            line[kernel["kind"]] += kernel["duration_us"]
        line[IDLE] = length_us(block) - sum(line.values())
        lines.append(line)
    return pd.DataFrame(lines).mean()


def blocks_beside(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what a block of the 2.0B backward consists of (``block_parts``), in columns: with
    nothing beside it, beside NCCL and beside copies. Raises Missing if one was not traced."""
    compared = {
        "nothing": step(rows, "naive", capture=False),
        "NCCL": step(rows, bucket_mb=100),
        "copies": step(rows, bucket_mb=100, **COPIES),
    }
    strips = traces.pictures("strip", rows)
    parts = {}
    for beside, row in compared.items():
        traced = strip_of(row, strips)
        if not traced:
            raise Missing(f"no trace of the step that has {beside} beside it")
        parts[beside] = block_parts(traced)
    return pd.DataFrame(parts)


def _has_all_along(kernel: dict, sent: list[dict]) -> bool:
    return traces.overlap_us([kernel], sent) > 0.99 * kernel["duration_us"]


def buckets_sent(bucket_mb: float) -> int:
    """Return the number of all-reduces of the 2.0B model's step: a parameter that is larger than a
    bucket has one of its own."""
    sizes = StepMemory(SIZES["xl25"]).parameters().values()
    return count_buckets(reversed(sizes), bucket_mb * MB)


def alone_by_count_ms(number: int, line: Line) -> float:
    """Return the ms that so many all-reduces of all of the 2.0B model's gradients take one after
    another: their overheads, and the bytes over the bandwidth."""
    size = 4 * parameter_count(SIZES["xl25"])
    return 1e3 * (number * line.overhead_s + size / line.bandwidth)


def after_table(rows: pd.DataFrame, line: Line, bandwidth: float) -> pd.DataFrame:
    """Return the 2.0B steps that send after the backward, in a CUDA graph: what their communication
    takes by count, alone and in the step, ms."""
    lines = []
    for wrapper, name in (("naive", "one per gradient"), ("flat", "one for all")):
        row = step(rows, wrapper)
        number = gradients() if wrapper == "naive" else 1
        counted = alone_by_count_ms(number, line)
        if wrapper == "flat":
            counted += flat_copies_ms(bandwidth)
        lines.append([name, number, *cells((counted, row.alone, row.exposed))])
    return pd.DataFrame(lines, columns=["all-reduces", "n", "counted", "alone", "added"])


def gradients() -> int:
    """Return the number of the 2.0B model's gradients."""
    return len(StepMemory(SIZES["xl25"]).parameters())


def flat_copies_ms(bandwidth: float) -> float:
    """Return the ms that fp32 gradients take into one tensor and back, both read and written, at a
    bandwidth in TB/s."""
    return 16 * parameter_count(SIZES["xl25"]) / bandwidth / 1e9


def sweep(rows: pd.DataFrame, sizes_mb, line: Line) -> pd.DataFrame:
    """Return the 2.0B steps launched from Python by bucket size: all-reduces, and the ms of
    communication by count, alone and in the step."""
    lines = []
    for bucket_mb in sizes_mb:
        row = step(rows, bucket_mb=bucket_mb, capture=False)
        number = buckets_sent(bucket_mb)
        times_ms = cells((alone_by_count_ms(number, line), row.alone, row.exposed))
        lines.append([f"{bucket_mb:,}", number, *times_ms, digits(row.paid)])
    return pd.DataFrame(lines, columns=["MiB", "n", "counted", "alone", "added", "share"])


def engine_bytes(gradient: int, sent: int) -> float:
    """Return the bytes per parameter that an exchange over copy engines reads and writes in the
    memory of each of two GPUs, by the bytes of a gradient and of what is sent of it."""
    half = sent / 2  # of each gradient a GPU owns one half
    to_owner = half + half  # read here, and written here by the other GPU
    mean_of_own = 2 * half + half  # both GPUs' read, their mean written
    to_all = half + half
    casts = 0 if sent == gradient else 2 * (gradient + sent)  # before and after
    return to_owner + mean_of_own + to_all + casts


def engines(rows: pd.DataFrame) -> list[tuple]:
    """Return the three ways in which gradients of the 2.0B model travel over copy engines: words,
    bytes per parameter in memory, and the step in a CUDA graph with one update at the end."""
    narrow = step(rows, "bucketed", 100, **COPIES, **NARROW)
    return [
        ("fp32", engine_bytes(4, 4), step(rows, "bucketed", 100, **COPIES)),
        ("fp32, sent in bf16", engine_bytes(4, 2), step(rows, "bucketed", 100, **CAST)),
        ("bf16, of 16-bit weights", engine_bytes(2, 2), narrow),
    ]


def engines_table(rows: pd.DataFrame, bandwidth: float) -> pd.DataFrame:
    """Return what the exchange moves through each GPU's memory, what that takes at a bandwidth in
    TB/s, and what the step grows by."""
    lines = []
    for name, moved, row in engines(rows):
        counted = moved * parameter_count(SIZES["xl25"]) / bandwidth / 1e9
        lines.append([name, digits(moved), *cells((counted, row.exposed))])
    return pd.DataFrame(lines, columns=["gradients", "bytes", "counted", "added"])


def others_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what communication adds by model and precision, in buckets of 100 MiB over NCCL,
    launched from Python; times in ms."""
    lines = []
    for model in ("xl25", "2.7B"):
        for precision in ("bf16", "fp32"):
            row = step(rows, bucket_mb=100, model=model, precision=precision, capture=False)
            numbers = cells((row.ms_backward_without, row.alone, row.exposed))
            lines.append([f"{TITLES[model]}, {precision}", *numbers, digits(row.paid)])
    return pd.DataFrame(lines, columns=["model", "backward", "alone", "added", "share"])


def updates_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the 2.0B step under autocast in a CUDA graph, in ms, with its update at the end and
    per bucket."""
    lines = []
    for carrier, name in (("backend", "NCCL"), ("copy_engines", "copy engines")):
        for wrapper, when in (("bucketed", "at the end"), ("updating", "per bucket")):
            row = step(rows, wrapper, 100, carrier=carrier)
            lines.append([f"{name}, {when}", *cells((row.base, row.ms, row.exposed))])
    return pd.DataFrame(lines, columns=["update", "one GPU", "two GPUs", "added"])


def handout_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return steps launched from Python in ms, a line per schedule that the handout asks for."""
    schedules = {
        "after, per parameter": ("naive", 0),
        "after, one all-reduce": ("flat", 0),
        "during, per parameter": ("overlapped", 0),
        "during, 1 MiB": ("bucketed", 1),
        "during, 10 MiB": ("bucketed", 10),
        "during, 100 MiB": ("bucketed", 100),
        "during, 1000 MiB": ("bucketed", 1000),
    }
    table = pd.DataFrame({"sent": list(schedules)})
    for model, precision in (("xl25", "fp32"), ("2.7B", "fp32"), ("xl25", "bf16")):
        times = []
        for wrapper, bucket_mb in schedules.values():
            setting = {"model": model, "precision": precision, "capture": False}
            times.append(step(rows, wrapper, bucket_mb, **setting).ms)
        table[f"{TITLES[model]}, {precision}"] = cells(times)
    return table


def added_bars(added_ms: dict[str, float]) -> Chart:
    """Draw what communication adds to a step, a bar for each way to send."""
    times = pd.DataFrame({"added": pd.Series(added_ms)})
    text = list(times["added"].map(digits))
    look = {"text": text, "numbers": False, "xlabel": "ms added to a step"}
    return stacks(times, {"added": COLOURS[4]}, 2.3, **look)


KERNEL_COLOURS = {
    "matmuls": COLOURS[1],
    "attention": COLOURS[0],
    "others": HEAT[5],
    "collectives": COLOURS[4],
}
NAMES = {MATMUL: "matmuls", ATTENTION: "attention", SENT: "collectives"}


@chart(height=3.2)
def lanes(figure, shown: dict[str, list[dict]], before_us: float, after_us: float):
    """Draw traces around the end of the backward, one below the other: what computes, and below it
    the collectives. Where attention marks the blocks of the backward, brackets show one of them."""
    axes = figure.subplots(len(shown), 1, sharex=True, sharey=True)
    names = set()
    for ax, (title, rows) in zip(axes, shown.items(), strict=True):
        end = max(map(traces.end_us, matmuls(rows)))
        for row in traces.cropped(rows, end - before_us, end + after_us):
            if row["stream"] == traces.HOST:
                continue
            y = 0.1 if row["kind"] == SENT else 1.1
            bar = [((row["start_us"] - end) / 1e3, row["duration_us"] / 1e3)]
            name = NAMES.get(row["kind"], "others")
            names.add(name)
            ax.broken_barh(bar, (y, 0.8), facecolor=KERNEL_COLOURS[name], linewidth=0)
        ax.set_ylim(0, 2.05)
        if blocks(rows):
            block = blocks(rows)[-2]
            left = (block[0]["start_us"] - end) / 1e3
            right = left + length_us(block) / 1e3
            bracket = {"arrowstyle": "|-|, widthA=0.25, widthB=0.25", "linewidth": 1.2}
            ax.annotate("", (left, 2.15), (right, 2.15), arrowprops=bracket)
            words = f"a block, {us(right - left, 3)}"
            label(ax, words, ((left + right) / 2, 2.2), (0, 3), ha="center")
            ax.set_ylim(0, 2.75)
        name_lanes(ax, [1.5, 0.5], ["computes", "sends"])
        ax.set_title(title, loc="left", fontsize=10.5)
    axes[-1].set_xlabel("ms from the end of the backward")
    colours = {name: colour for name, colour in KERNEL_COLOURS.items() if name in names}
    traces.legend(figure, colours, columns=4)

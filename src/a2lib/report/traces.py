"""Traces: a step's kernels over time (strips), and the bulk tables of them.

    strips({"Busy": picture("strip", page.rows, model="2.7B"), ...})
    kernels(page.rows)                        # every kernel of every trace, and what it belongs to

A row of a strip is a stretch of a stream, a dict with start_us, duration_us, stream ("host" for the
calls that launch), kind (the class of the kernel), phase and part. Nothing here imports torch.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pandas as pd
from matplotlib.patches import Patch

from a2lib.lab import bulk, kernel_names
from a2lib.lab.kernel_names import plain
from a2lib.lab.trace import HOST
from a2lib.lab.trace import union as covered
from a2lib.report import data, panels, plots
from a2lib.report.page import Missing
from a2lib.report.style import Chart

# In the order of kernel_names.KINDS; what a step mostly consists of differs in lightness too.
_PALETTE = (
    "#0072b2", "#d55e00", "#b0558a", "#00825f", "#f0ad78", "#8b5a2b", "#808080",
    "#86b6e6", "#a86f00", "#f6cfab", "#444444", "#b5d2f0", "#dddddd",
)  # fmt: skip
KINDS = dict(zip(kernel_names.KINDS, _PALETTE, strict=True))
CLASSES = {"matmul": "matmul", "attention": "flash", "copy": "copies", "optimizer": "adamw"}
_read = cache(bulk.read)  # pages of one process share pictures, which none of them changes


def pictures(
    table: str, rows: pd.DataFrame, roots: list[Path] | None = None
) -> dict[str, bulk.Picture]:
    """Return the pictures of a bulk table by name, of the device that ``rows`` of a section were
    measured on. What was measured here replaces what came with the project.

    Raises ReportError for a picture whose run is not in runs.csv.
    """
    device = rows["device"].iloc[0]
    local = bool(rows["local"].iloc[0])
    runs = data.load_runs(roots).index
    pictures = {}
    for position, root in enumerate(data.data_roots() if roots is None else roots):
        root_is_local = device != data.PUBLISHED or position > 0
        if root_is_local != local:
            continue
        for of_device, name in bulk.pictures(table, root):
            if of_device != device:
                continue
            picture = _read(table, device, name, root)
            if picture.run not in runs:
                raise data.ReportError(f"{table} {name} of {device}: no run {picture.run!r}")
            pictures[name] = picture
    return pictures


def picture(table: str, rows: pd.DataFrame, **about) -> list[dict]:
    """Return the rows of the only picture whose first line has ``about``.

    Raises Missing if there is none, or several.
    """
    every = pictures(table, rows)
    names = [name for name, each in every.items() if about.items() <= each.about.items()]
    if len(names) != 1:
        fitting = ", ".join(names) or "none"
        raise Missing(f"{table} of {about}: {fitting} of {', '.join(every)}")
    return every[names[0]].rows


def traced(row, pictures: dict[str, bulk.Picture]) -> list[dict]:
    """Return the rows of the first picture of what a section's ``row`` is about; [] if none is."""
    for picture in pictures.values():
        differ = [key for key, value in picture.about.items() if getattr(row, key, value) != value]
        if not differ:
            return picture.rows
    return []


def kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """Return every kernel of a step of each of the profile's traces.

    The columns are those of the bulk table ``kernels`` and what the trace is about (model, context,
    ...). Without a trace there are no rows.
    """
    frames = []
    for picture in pictures("kernels", rows).values():
        if "section" not in picture.about:  # a trace of another section names that
            frames.append(pd.DataFrame(picture.rows).assign(**picture.about))
    if not frames:
        return pd.DataFrame(columns=list(bulk.TABLES["kernels"]))
    table = pd.concat(frames, ignore_index=True)
    return table.assign(kernel=table["kernel"].map(plain))


def ms_by_class(kernels: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    """Return the kernel time (ms) of each case of the columns ``key``, by the class of kernel.

    matmul, flash, copies, adamw, between: of matmuls, fused attention, copies, AdamW, all others
    total: of all kernels
    """
    classes = kernels["kind"].map(CLASSES).fillna("between").rename("class")
    sums = kernels.groupby([*key, classes])["ms"].sum().unstack(fill_value=0.0)
    sums = sums.reindex(columns=[*CLASSES.values(), "between"], fill_value=0.0)
    return sums.assign(total=sums.sum(axis=1))


def union(rows: Iterable[dict]) -> list[tuple[float, float]]:
    """Return the intervals, in µs and in order, in which at least one of a strip's rows runs."""
    return covered((row["start_us"], end_us(row)) for row in rows)


def covered_us(rows: Iterable[dict]) -> float:
    """Return the time in µs in which at least one of a strip's rows runs."""
    total = 0.0
    for start, end in union(rows):
        total += end - start
    return total


def of_kind(rows: Iterable[dict], kind: str) -> list[dict]:
    """Return the rows of one class of kernels."""
    return [row for row in rows if row["kind"] == kind]


def end_us(row: dict) -> float:
    """Return when a strip's row ends, in µs."""
    return row["start_us"] + row["duration_us"]


def cropped(rows: Iterable[dict], start: float, end: float) -> list[dict]:
    """Return the rows that start between two times, cut off at the second one."""
    inside = []
    for row in rows:
        if start < row["start_us"] < end:
            duration_us = min(row["duration_us"], end - row["start_us"])
            inside.append({**row, "duration_us": duration_us})
    return inside


def overlap_us(rows: Iterable[dict], others: Iterable[dict]) -> float:
    """Return the time in µs in which one of ``rows`` and one of ``others`` run concurrently."""
    other_intervals = union(others)
    total = 0.0
    for start, end in union(rows):
        for other_start, other_end in other_intervals:
            total += max(0.0, min(end, other_end) - max(start, other_start))
    return total


def idle_share(rows: Iterable[dict]) -> float:
    """Return the share of a strip, from its first kernel to its last, in which no kernel runs."""
    kernels = [row for row in rows if row["stream"] != HOST]
    busy = union(kernels)
    return 1 - covered_us(kernels) / (busy[-1][1] - busy[0][0])


def strips(shown: dict[str, Sequence[dict]]) -> Chart:
    """Return a chart of strips one above another, each under its title, on one axis of time that
    begins where each strip begins: a row for each stream, launches first."""
    drawn, streams, present = {}, {}, set()
    for title, rows in shown.items():
        frame = pd.DataFrame(list(rows))
        drawn[title] = frame
        streams[title] = _streams(frame["stream"])
        present.update(frame["kind"])
    heights = list(map(len, streams.values()))
    kinds = {kind: colour for kind, colour in KINDS.items() if kind in present}

    def draw(figure):
        axes = figure.subplots(len(drawn), 1, squeeze=False, sharex=True, height_ratios=heights)
        for ax, (title, frame) in zip(axes[:, 0], drawn.items(), strict=True):
            _draw_strip(ax, frame, streams[title], kinds)
            ax.set_title(title, loc="left")
        ax.set_xlabel("time (µs)")
        ax.set_xlim(left=0)
        legend(figure, kinds)

    lines = sum(heights) + 0.8 * (len(drawn) - 1)
    return Chart(draw, height=1.4 + 0.36 * lines + 0.22 * math.ceil(len(kinds) / 3))


def _streams(names: pd.Series) -> list[str]:
    """Return the streams of a strip, the launches first."""
    return sorted(names.unique(), key=lambda stream: (stream != HOST, stream))


def _draw_strip(ax, rows: pd.DataFrame, streams: list[str], kinds: dict[str, str]) -> None:
    """Draw a box for each kernel (or launch) of each stream, in the colour of its class."""
    boxes = rows.assign(start_us=rows["start_us"] - rows["start_us"].min())
    for y, stream in enumerate(streams):
        for kind, colour in kinds.items():
            few = boxes[(boxes["stream"] == stream) & (boxes["kind"] == kind)]
            spans = few[["start_us", "duration_us"]].to_numpy()
            ax.broken_barh(spans, (y - 0.36, 0.72), facecolor=colour, linewidth=0)
    names = []
    is_one_of_the_gpu = len(streams) == 2 and HOST in streams
    for stream in streams:
        name = "GPU" if is_one_of_the_gpu else f"stream {stream}"
        names.append("launches" if stream == HOST else name)
    plots.name_lanes(ax, range(len(streams)), names)
    ax.invert_yaxis()
    ax.grid(False)


def legend(figure, colours: dict[str, str], columns: int = 3) -> None:
    """Draw a legend of colours above the panels."""
    patches = []
    for name, colour in colours.items():
        patches.append(Patch(color=colour, label=name, linewidth=0))
    panels.legend(figure, patches, columns)

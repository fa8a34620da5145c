"""Traces: a step's kernels over time (strips), and the bulk tables of them.

    strips({"Busy": picture("strip", page.rows, model="2.7B"), ...})
    kernels(page.rows)                        # every kernel of every trace, and what it belongs to

A row of a strip is a stretch of a stream, a dict with start_us, duration_us, stream ("host" for the
calls that launch), kind (the class of the kernel), phase and part. Nothing here imports torch.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path as File

import pandas as pd
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from a2lib.lab import bulk, kernel_names
from a2lib.lab.kernel_names import plain
from a2lib.lab.trace import HOST
from a2lib.lab.trace import union as covered
from a2lib.report import data, panels
from a2lib.report.page import Missing
from a2lib.report.style import PAPER, Chart

# In the order of kernel_names.KINDS; what a step mostly consists of differs in lightness too.
_PALETTE = (
    "#0072b2", "#d55e00", "#b0558a", "#00825f", "#f0ad78", "#8b5a2b", "#808080",
    "#86b6e6", "#a86f00", "#f6cfab", "#444444", "#b5d2f0", "#dddddd",
)  # fmt: skip
KINDS = dict(zip(kernel_names.KINDS, _PALETTE, strict=True))
BLOCKED = "blocked launch"  # of any kernel: it waits for a place in a full queue
BLOCKED_US = 200  # a launch of this length is one; under a profiler others take up to some 50
COLOURS = KINDS | {BLOCKED: "#000000"}
CLASSES = {"matmul": "matmul", "attention": "flash", "copy": "copies", "optimizer": "adamw"}
LEAST = 1 / 700  # of the width: what is narrower is drawn with its neighbours
LONG_US = 2_000  # a strip from there on has its axis in ms
LETTER = 0.0195  # of the width of a strip that a letter takes
LANES = ("part", "module", "phase")
STREAMS = 4  # with more, all but the busiest share a row
_read = cache(bulk.read)  # pages of one process share pictures, which none of them changes


def pictures(
    table: str, rows: pd.DataFrame, roots: list[File] | None = None
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
        names = [name for of_device, name in bulk.pictures(table, root) if of_device == device]
        for name in names:
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
    names = [name for name in every if about.items() <= every[name].about.items()]
    if len(names) != 1:
        raise Missing(f"{table} of {about}: {', '.join(names) or 'none'} of {', '.join(every)}")
    return every[names[0]].rows


def traced(row, pictures: dict[str, bulk.Picture]) -> list[dict]:
    """Return the rows of the first picture of what a section's ``row`` is about; [] if none is."""
    for picture in pictures.values():
        about = picture.about
        if all(getattr(row, key, value) == value for key, value in about.items()):
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


def end_us(row: dict) -> float:
    """Return when a strip's row ends, in µs."""
    return row["start_us"] + row["duration_us"]


def cropped(rows: Iterable[dict], start: float, end: float) -> list[dict]:
    """Return the rows that start between two times, cut off at the second one."""
    inside = [row for row in rows if start < row["start_us"] < end]
    return [row | {"duration_us": min(row["duration_us"], end - row["start_us"])} for row in inside]


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
    busy = union(row for row in rows if row["stream"] != HOST)
    busy_us = sum(end - start for start, end in busy)
    return 1 - busy_us / (busy[-1][1] - busy[0][0])


def strips(shown: dict[str, Sequence[dict]], *, lanes: Sequence[str] = LANES) -> Chart:
    """Return a chart of strips one above another, each under its title, on one axis of time that
    begins where each strip begins.

    ``lanes`` are the ranges that stand above the kernels, from the lowest, where a strip has them.
    """
    drawn = {title: _Strip(list(rows), lanes) for title, rows in shown.items() if len(rows)}
    if not drawn:
        return panels.empty()
    width = max(strip.end_us() for strip in drawn.values())
    kinds_present = set().union(*(strip.kinds() for strip in drawn.values()))
    kinds = [kind for kind in COLOURS if kind in kinds_present]
    heights = [strip.height for strip in drawn.values()]

    def draw(figure):
        axes = figure.subplots(len(drawn), 1, squeeze=False, sharex=True, height_ratios=heights)
        strokes = []
        for ax, (title, strip) in zip(axes[:, 0], drawn.items(), strict=True):
            for stroke in strip.draw(ax, kinds, width):
                strokes.append((ax, strip.height, stroke))
            ax.set_title(title, loc="left")
        ax.set_xlim(0, width)
        ax.set_xlabel("time (ms)" if width >= LONG_US else "time (µs)")
        if width >= LONG_US:
            ax.xaxis.set_major_formatter(lambda us, _: f"{us / 1e3:g}")
        legend(figure, {kind: COLOURS[kind] for kind in kinds})

        def set_thickness():
            for ax, height, stroke in strokes:  # in points
                stroke.set_linewidth(0.72 * ax.bbox.height / figure.dpi * 72 / height)

        return set_thickness

    lines = sum(heights) + 0.8 * (len(drawn) - 1)
    legend_lines = math.ceil(len(kinds) / 3)
    return Chart(draw, height=1.4 + 0.36 * lines + 0.22 * legend_lines)


def legend(figure, colours: dict[str, str], columns: int = 3) -> None:
    """Draw a legend of colours above the panels."""
    patches = [Patch(color=colour, label=name, linewidth=0) for name, colour in colours.items()]
    panels.legend(figure, patches, columns)


class _Strip:
    """The rows of a strip from time 0 on, its streams (launches first) and the lanes it fills."""

    def __init__(self, rows: list[dict], lanes: Sequence[str]):
        begin = min(row["start_us"] for row in rows)
        self.rows = [_prepared(row, begin) for row in _in_few_streams(rows)]
        self.streams = sorted({row["stream"] for row in self.rows}, key=_stream_order)
        self.lanes = [lane for lane in lanes if self._fills(lane)]
        self.height = len(self.streams) + len(self.lanes)

    def _fills(self, lane: str) -> bool:
        """Return whether any row has a name in a lane that the phase does not have already."""
        has_parts = any(row["part"] != row["phase"] for row in self.rows)
        return any(row[lane] for row in self.rows) and (has_parts or lane == "phase")

    def end_us(self) -> float:
        """Return when the last row ends."""
        return union(self.rows)[-1][1]

    def kinds(self) -> set[str]:
        """Return the kinds of the rows."""
        return {row["kind"] for row in self.rows}

    def draw(self, ax, kinds: list[str], width: float) -> list[PathPatch]:
        """Draw the strip; return its strokes, whose thickness is set when the layout is final."""
        strokes = []
        for y, stream in enumerate(reversed(self.streams)):
            of_stream = [row for row in self.rows if row["stream"] == stream]
            for kind in kinds:
                of_kind = [row for row in of_stream if row["kind"] == kind]
                strokes.append(_stroke(ax, of_kind, y, COLOURS[kind], width * LEAST))
        # What two streams do at once has no single name: the lanes are those of the busiest.
        busiest = max(self.streams, key=self._busyness)
        named = [row for row in self.rows if row["stream"] == busiest]
        for level, lane in enumerate(self.lanes, start=len(self.streams)):
            _draw_lane(ax, named, lane, level, width)
        names = [_stream_name(stream) for stream in reversed(self.streams)]
        if len(self.streams) == 2 and self.streams[0] == HOST:  # launches, and where they go
            names[0] = "GPU"
        ax.set_yticks(range(self.height), [*names, *self.lanes])
        ax.set_ylim(-0.6, self.height - 0.4)
        ax.grid(False)
        return strokes

    def _busyness(self, stream: str) -> tuple[bool, float]:
        return stream != HOST, _busy_us(self.rows, stream)


def _prepared(row: dict, begin: float) -> dict:
    """Return a row from ``begin`` on, with the module and the part of its part: "attn.q_proj" is
    the part q_proj of the module attn. A launch that takes long is of the kind BLOCKED."""
    module, _, part = row["part"].rpartition(".")
    prepared = {**row, "part": part, "module": module.partition(".")[0] or part}
    prepared["start_us"] = row["start_us"] - begin
    if row["stream"] == HOST and row["duration_us"] >= BLOCKED_US:
        prepared["kind"] = BLOCKED
    return prepared


def _in_few_streams(rows: list[dict]) -> list[dict]:
    """Return the rows; if they have more than STREAMS streams, as the branches of a CUDA graph do,
    all of these except the busiest become one."""
    streams = {row["stream"] for row in rows} - {HOST}
    if len(streams) <= STREAMS:
        return rows
    streams.remove(max(streams, key=lambda stream: _busy_us(rows, stream)))
    merged = f"{len(streams)} others"
    return [{**row, "stream": merged} if row["stream"] in streams else row for row in rows]


def _stream_name(stream: str) -> str:
    if stream == HOST:
        return "launches"
    return f"stream {stream}" if stream.isdigit() else stream


def _stream_order(stream: str) -> tuple:
    """Return a key that sorts launches first, then streams by number, then the others by name."""
    return stream != HOST, not stream.isdigit(), len(stream), stream


def _busy_us(rows: list[dict], stream: str) -> float:
    return sum(row["duration_us"] for row in rows if row["stream"] == stream)


def _stroke(ax, rows: list[dict], y: float, colour: str, least: float) -> PathPatch:
    """Draw the rows as one line with gaps, which makes a small SVG; gaps below ``least`` close."""
    ends: list[float] = []
    for start, end in union(rows):
        if ends and start - ends[-1] < least:
            ends[-1] = end
        else:
            ends += [start, end]
    corners = [(x, y) for x in ends]
    moves = [Path.MOVETO, Path.LINETO] * (len(ends) // 2)
    path = Path(corners or [(0, y)], moves or None)
    path.should_simplify = False
    return ax.add_patch(PathPatch(path, fill=False, color=colour, capstyle="butt"))


def _draw_lane(ax, rows: list[dict], lane: str, level: float, width: float) -> None:
    """Draw a box for each stretch of kernels of one phase (or part), with its name if it fits."""
    in_order = sorted(rows, key=lambda row: row["start_us"])
    for name, stretch in groupby(in_order, key=lambda row: row[lane]):
        intervals = union(stretch)
        start, end = intervals[0][0], intervals[-1][1]
        share = (end - start) / width
        if not name or share <= LEAST:
            continue
        across = [(start, end - start)]
        upwards = (level - 0.36, 0.72)
        ax.broken_barh(across, upwards, facecolor="#eeeeee", edgecolor=PAPER, linewidth=0.6)
        if share > LETTER * len(name):
            middle = (start + end) / 2, level
            ax.annotate(name, middle, ha="center", va="center_baseline")

"""Traces: a step's kernels in time (strips), and the bulk tables of them.

    strips({"Busy": picture("strip", page.rows, model="2.7B"), ...})
    kernels(page.rows)                        # every kernel of every trace, and what that is of

A row of a strip is a stretch of a stream: start_us, duration_us, stream ("host" for the calls that
launch), kind (the class of the kernel), phase, part. Nothing here imports torch.
"""

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

# Class by class; what a step is mostly made of differs in lightness too.
_PALETTE = """#0072b2 #d55e00 #b0558a #00825f #f0ad78 #8b5a2b #808080 #86b6e6
              #a86f00 #f6cfab #444444 #b5d2f0 #dddddd"""
KINDS = dict(zip(kernel_names.KINDS, _PALETTE.split(), strict=True))
BLOCKED = "blocked launch"  # of any kernel: it waits for a place in a full queue
BLOCKED_US = 200  # a launch of this length is one; under a profiler others take up to some 50
COLOURS = KINDS | {BLOCKED: "#000000"}
LEAST = 1 / 700  # of the width: what is narrower is drawn with its neighbours
LONG_US = 2_000  # a strip from there on has its axis in ms
LETTER = 0.0195  # of the width of a strip that a letter takes
LANES = ("part", "module", "phase")
STREAMS = 4  # with more, all but the busiest share a row
_read = cache(bulk.read)  # pages of one process share pictures, which none of them changes


def pictures(
    table: str, rows: pd.DataFrame, roots: list[File] | None = None
) -> dict[str, bulk.Picture]:
    """Name -> picture of a bulk table, of the device that ``rows`` of a section were measured on;
    what was measured here replaces what came with the project.

    Raises ReportError for a picture whose run is not in runs.csv.
    """
    device, local = rows["device"].iloc[0], bool(rows["local"].iloc[0])
    runs, found = data.load_runs(roots).index, {}
    for position, root in enumerate(data.data_roots() if roots is None else roots):
        if (device != data.PUBLISHED or position > 0) != local:
            continue
        for name in (name for where, name in bulk.pictures(table, root) if where == device):
            found[name] = _read(table, device, name, root)
            if found[name].run not in runs:
                raise data.ReportError(f"{table} {name} of {device}: no run {found[name].run!r}")
    return found


def picture(table: str, rows: pd.DataFrame, **about) -> list[dict]:
    """The rows of the one picture that is of ``about`` (its first line says what it is of).

    Raises Missing where there is none or several.
    """
    every = pictures(table, rows)
    names = [n for n, p in every.items() if about.items() <= p.about.items()]
    if len(names) != 1:
        raise Missing(f"{table} of {about}: {', '.join(names) or 'none'} of {', '.join(every)}")
    return every[names[0]].rows


def traced(row, found: dict[str, bulk.Picture]) -> list[dict]:
    """The rows of the first picture that is of what a section's ``row`` is of; empty without."""
    for one in found.values():
        if all(getattr(row, key, value) == value for key, value in one.about.items()):
            return one.rows
    return []


def kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """Every kernel of a step of each of the profile's traces: the columns of the bulk table
    ``kernels`` and what the trace is of (model, context, ...); no rows where nothing is traced."""
    # Those of another section name it.
    every = [p for p in pictures("kernels", rows).values() if "section" not in p.about]
    if not every:
        return pd.DataFrame(columns=list(bulk.TABLES["kernels"]))
    found = pd.concat([pd.DataFrame(p.rows).assign(**p.about) for p in every], ignore_index=True)
    return found.assign(kernel=found["kernel"].map(plain))


def union(rows: Iterable[dict]) -> list[tuple[float, float]]:
    """The intervals in which at least one of a strip's rows runs, in order, in µs."""
    return covered((r["start_us"], r["start_us"] + r["duration_us"]) for r in rows)


def overlap_us(rows: Iterable[dict], others: Iterable[dict]) -> float:
    """Microseconds in which one of ``rows`` and one of ``others`` run."""
    found, other = union(rows), union(others)
    both = (min(e, stop) - max(s, begin) for s, e in found for begin, stop in other)
    return sum(max(0.0, us) for us in both)


def idle_share(rows: Iterable[dict]) -> float:
    """The share of a strip's time, from its first kernel to its last, in which no kernel runs."""
    busy = union(row for row in rows if row["stream"] != HOST)
    return 1 - sum(end - start for start, end in busy) / (busy[-1][1] - busy[0][0])


def strips(shown: dict[str, Sequence[dict]], *, lanes: Sequence[str] = LANES) -> Chart:
    """Strips one above another, each under its title, on one axis of time from each one's begin.

    ``lanes`` are the ranges that stand above the kernels, from below, where a strip has them.
    """
    drawn = {title: _prepared(list(rows), lanes) for title, rows in shown.items() if len(rows)}
    if not drawn:
        return panels.empty()
    width = max(union(rows)[-1][1] for rows, *_ in drawn.values())
    kinds = _present(COLOURS, (row["kind"] for rows, *_ in drawn.values() for row in rows))
    heights = [len(streams) + len(names) for _, streams, names in drawn.values()]

    def draw(figure):
        axes = figure.subplots(len(drawn), 1, squeeze=False, sharex=True, height_ratios=heights)
        strokes = []
        for ax, title, height in zip(axes[:, 0], drawn, heights, strict=True):
            strokes += [(ax, height, one) for one in _panel(ax, *drawn[title], kinds, width)]
            ax.set_title(title, loc="left")
        ax.set_xlim(0, width)
        ax.set_xlabel("time (ms)" if width >= LONG_US else "time (µs)")
        if width >= LONG_US:
            ax.xaxis.set_major_formatter(lambda us, _: f"{us / 1e3:g}")
        legend(figure, {kind: COLOURS[kind] for kind in kinds})

        def finish():
            for ax, height, one in strokes:  # in points
                one.set_linewidth(0.72 * ax.bbox.height / figure.dpi * 72 / height)

        return finish

    rows = sum(heights) + 0.8 * (len(drawn) - 1)
    return Chart(draw, height=1.4 + 0.36 * rows + 0.22 * -(-len(kinds) // 3))


def legend(figure, colours: dict[str, str], columns: int = 3) -> None:
    """Names of colours, above the panels."""
    patches = [Patch(color=colour, label=name, linewidth=0) for name, colour in colours.items()]
    panels.legend(figure, patches, columns)


def _prepared(rows: list[dict], lanes: Sequence[str]) -> tuple[list[dict], list[str], list[str]]:
    """A strip's rows from time 0 on, its streams from the host on, and the lanes that it fills."""
    begin = min(row["start_us"] for row in rows)
    # Where no range is within a phase, its parts would be the phase once more.
    finer = any(row["part"] != row["phase"] for row in rows)
    found = []
    for row in _in_few_streams(rows):
        # "attn.q_proj" is the part q_proj of the module attn, where there is room for one alone.
        module, _, part = row["part"].rpartition(".")
        names = {"module": module.partition(".")[0] or part, "part": part}
        is_blocked = row["stream"] == HOST and row["duration_us"] >= BLOCKED_US
        names["kind"] = BLOCKED if is_blocked else row["kind"]
        found.append(row | names | {"start_us": row["start_us"] - begin})
    streams = sorted({row["stream"] for row in found}, key=_number)
    filled = [c for c in lanes if any(row[c] for row in found) and (finer or c == "phase")]
    return found, streams, filled


def _panel(ax, rows, streams, lanes, kinds, width: float) -> list[PathPatch]:
    """One strip; the strokes it is drawn with, whose thickness is set when the layout is final."""
    strokes, height = [], len(streams) + len(lanes)
    for y, stream in enumerate(reversed(streams)):
        for kind in kinds:
            here = [r for r in rows if r["stream"] == stream and r["kind"] == kind]
            strokes.append(_stroke(ax, here, y, COLOURS[kind], width * LEAST))
    # Those of the busiest stream: what two streams do at once has no one name.
    busiest = max(streams, key=lambda stream: (stream != HOST, _time(rows, stream)))
    named = [row for row in rows if row["stream"] == busiest]
    for level, column in enumerate(lanes, start=len(streams)):
        _lane(ax, named, column, level, width)
    names = [_stream(stream) for stream in reversed(streams)]
    if len(streams) == 2 and streams[0] == HOST:  # its launches and the one stream they go to
        names[0] = "GPU"
    ax.set_yticks(range(height), [*names, *lanes])
    ax.set_ylim(-0.6, height - 0.4)
    ax.grid(False)
    return strokes


def _present(all_: Iterable[str], found: Iterable[str]) -> list[str]:
    found = set(found)
    return [name for name in all_ if name in found]


def _stream(name: str) -> str:
    return "launches" if name == HOST else f"stream {name}" if name.isdigit() else name


def _number(stream: str) -> tuple:
    return stream != HOST, not stream.isdigit(), len(stream), stream


def _in_few_streams(rows: list[dict]) -> list[dict]:
    """The rows, and where they have many streams, which branches of a replayed graph get, all but
    the busiest one as one."""
    own = {row["stream"] for row in rows} - {HOST}
    if len(own) <= STREAMS:
        return rows
    own.remove(max(own, key=lambda stream: _time(rows, stream)))
    return [r | {"stream": f"{len(own)} others"} if r["stream"] in own else r for r in rows]


def _time(rows: list[dict], stream: str) -> float:
    return sum(row["duration_us"] for row in rows if row["stream"] == stream)


def _stroke(ax, rows: list[dict], y: float, colour: str, least: float) -> PathPatch:
    """The rows as one line with gaps (letters are saved so); those closer than ``least`` in one."""
    ends: list[float] = []
    for start, end in union(rows):
        if ends and start - ends[-1] < least:
            ends[-1] = end
        else:
            ends += [start, end]
    corners = [(x, y) for x in ends]
    path = Path(corners or [(0, y)], [Path.MOVETO, Path.LINETO] * (len(ends) // 2) or None)
    path.should_simplify = False
    return ax.add_patch(PathPatch(path, fill=False, color=colour, capstyle="butt"))


def _lane(ax, rows: list[dict], column: str, level: float, width: float) -> None:
    """One box for each stretch of kernels of one phase (or part), named where the name fits."""
    in_order = sorted(rows, key=lambda row: row["start_us"])
    for name, stretch in groupby(in_order, key=lambda row: row[column]):
        times = union(stretch)
        start, end = times[0][0], times[-1][1]
        if name and end - start > width * LEAST:
            box = {"facecolor": "#eeeeee", "edgecolor": PAPER, "linewidth": 0.6}
            ax.broken_barh([(start, end - start)], (level - 0.36, 0.72), **box)
            if (end - start) / width > LETTER * len(name):
                ax.annotate(name, ((start + end) / 2, level), ha="center", va="center_baseline")

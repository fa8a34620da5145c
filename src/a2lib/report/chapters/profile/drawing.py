"""Pictures of one step: kernels in time, time by class, memory by category.

Each takes a file as ``a2lib.measure.trace`` and ``a2lib.measure.snapshot`` read it, or the rows of
a bulk table; in a notebook the result shows itself. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike

from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from a2lib.measure import snapshot, trace
from a2lib.measure.trace.kernels import PHASES
from a2lib.measure.trace.window import HOST
from a2lib.report import panels
from a2lib.report.style import DIM, INK, PAPER, Chart

# Of svg.PAIRS. What a step is mostly made of differs in lightness too.
KINDS = {
    "matmul": "#0072b2", "attention": "#d55e00", "softmax": "#b0558a", "normalisation": "#00825f",
    "elementwise": "#f0ad78", "reduction": "#8b5a2b", "copy": "#808080", "fused": "#86b6e6",
    "loss": "#a86f00", "embedding": "#f6cfab", "optimizer": "#444444", "communication": "#b5d2f0",
    "other": "#dddddd",
}  # fmt: skip
CATEGORIES = {
    "parameters": "#444444", "optimizer state": "#808080", "gradients": "#0072b2",
    "saved for backward": "#d55e00", "temporaries": "#f6cfab", "other": "#dddddd",
}  # fmt: skip
LEAST = 1 / 700  # of the width: what is narrower is drawn with its neighbours
LONG_US = 10_000  # a strip from there on has its axis in ms
CORNERS = 1080  # of all areas of a timeline together
LETTER = 0.0195  # of the width of a strip that a letter takes
STREAMS = 4  # with more, those that are never busy at once share a row
MB = 1e6

Source = str | PathLike | Sequence[dict]


def strip(source: Source, *, start_us: float = 0, length_us: float | None = None) -> Chart:
    """Kernels by stream against time, coloured by class, with phase, module and part above.

    A file is cut to the window that begins ``start_us`` after its first event; rows of the bulk
    table ``strip`` are drawn as they are. The host's row are the launches. A replayed graph gives
    each of its branches a stream: beside the busiest one they share rows. Raises as
    ``a2lib.measure.trace.read`` and ``strip_rows``, and ValueError where a file's window is empty.
    """
    rows = source
    if isinstance(source, str | PathLike):
        length = None if length_us is None else round(length_us * 1000)
        kernels = trace.read(source).kernels
        rows = trace.strip_rows(kernels, round(start_us * 1000), length)
        if not rows:
            end = max(kernel.end_ns for kernel in kernels) / 1000
            raise ValueError(f"nothing ran in the window from {start_us:g} µs on; allowed are "
                             f"windows with a kernel or a launch, before {end:g} µs")  # fmt: skip
    rows = _in_few_streams(list(rows))
    if not rows:
        return panels.empty()
    end = max(row["start_us"] + row["duration_us"] for row in rows)
    begin = min(row["start_us"] for row in rows)
    streams = list(dict.fromkeys(row["stream"] for row in rows if row["stream"] != HOST))
    shown = [HOST] * any(row["stream"] == HOST for row in rows) + sorted(streams, key=_number)
    # "attn.q_proj" is the part q_proj of the module attn, where there is room for one alone.
    rows = [row | dict(zip(("module", "_", "part"), row["part"].rpartition("."), strict=True))
            for row in rows]  # fmt: skip
    # Where no range is within a phase, its parts would be the phase once more.
    finer = any(row["part"] != row["phase"] for row in rows)
    lanes = [column for column in ("part", "module", "phase")
             if any(row[column] for row in rows) and (finer or column == "phase")]  # fmt: skip
    rows = [row | {"module": row["module"].partition(".")[0] or row["part"]} for row in rows]
    kinds = _present(KINDS, (row["kind"] for row in rows))

    def draw(figure):
        ax, drawn = figure.subplots(), []
        height = len(shown) + len(lanes)
        for y, stream in enumerate(shown):
            here = [row for row in rows if row["stream"] == stream]
            for kind in kinds:
                bars = _bars([row for row in here if row["kind"] == kind], (end - begin) * LEAST)
                drawn.append(_stroke(ax, bars, len(shown) - 1 - y, KINDS[kind]))
        # Those of the busiest stream: what two streams do at once has no one name.
        busiest = max(shown, key=lambda s: (s != HOST, _time(rows, s)))
        named = [row for row in rows if row["stream"] == busiest]
        for level, column in enumerate(lanes, start=len(shown)):
            _lane(ax, named, column, level, end - begin)
        ax.set_yticks(range(height), [*(_stream(s) for s in reversed(shown)), *lanes])
        ax.set_ylim(-0.6, height - 0.4)
        ax.set_xlim(begin, end)
        ax.set_xlabel("time (µs)")
        if end - begin >= LONG_US:
            ax.xaxis.set_major_formatter(lambda us, _: f"{us / 1e3:g}")
            ax.set_xlabel("time (ms)")
        ax.grid(False)
        legend(figure, {kind: KINDS[kind] for kind in kinds})

        def finish():
            unit = ax.get_window_extent().height / figure.dpi * 72 / height  # points
            for one in drawn:
                one.set_linewidth(0.72 * unit)

        return finish

    height = 1.4 + 0.36 * (len(shown) + len(lanes)) + 0.22 * -(-len(kinds) // 3)
    return Chart(draw, height=height)


def step_bar(source: Source, *, steps: int | None = None) -> Chart:
    """Milliseconds of a step by phase, each bar made of the classes of its kernels.

    A file's kernels count over the steps that it names ("step 0", or "ProfilerStep#0" by the
    schedule of torch.profiler), so that a bar is the mean of a step; ``steps`` says how many there
    are where none is named, and for rows of the bulk table ``kernels`` (1 unless given). Raises as
    ``a2lib.measure.trace.read``, and ValueError for no steps.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps is {steps}; allowed are 1 or more")
    if isinstance(source, str | PathLike):
        found = trace.read(source)
        named = found.steps()
        kernels = [k for one in named.values() for k in one] or found.kernels
        # What lies in no phase has the name of its step, which is not to be a bar for each.
        rows = [row | {"phase": trace.STEP} if row["phase"] in named else row
                for row in trace.kernel_rows(kernels)]  # fmt: skip
        steps = steps or len(named) or 1
    else:
        rows, steps = list(source), steps or 1
    if not rows:
        return panels.empty()
    phases = [*(p for p in PHASES if any(row["phase"] == p for row in rows))]
    phases += sorted({row["phase"] for row in rows} - set(phases))
    kinds = _present(KINDS, (row["kind"] for row in rows))

    def draw(figure):
        ax = figure.subplots()
        for y, phase in enumerate(reversed(phases)):
            left = 0.0
            for kind in kinds:
                ms = sum(r["ms"] for r in rows if (r["phase"], r["kind"]) == (phase, kind)) / steps
                if ms:
                    ax.barh(y, ms, left=left, height=0.66, color=KINDS[kind], linewidth=0)
                left += ms
            said = f"{left:.3g}" if left < 1000 else f"{left:.0f}"
            ax.annotate(said, (left, y), xytext=(4, 0), textcoords="offset points", va="center")
        ax.set_yticks(range(len(phases)), [phase or "no range" for phase in reversed(phases)])
        ax.margins(x=0.12)
        ax.set_xlabel("time of kernels in a step (ms)")
        ax.grid(False, axis="y")
        legend(figure, {kind: KINDS[kind] for kind in kinds})

    return Chart(draw, height=1.0 + 0.42 * len(phases) + 0.22 * -(-len(kinds) // 3))


def memory(source: Source, *, phase: str | None = None, total_bytes: int | None = None,
           along: str = "host time (ms)") -> Chart:  # fmt: skip
    """Bytes by category against time, stacked, with the phases above and the peak marked.

    ``phase`` cuts a file to the phases of that name ("step 0"); ``total_bytes`` draws the device's
    memory as a line; ``along`` says what thousands of ``time_us`` are. The peak is that of the
    source, also where lines are thinned. Raises as ``a2lib.measure.snapshot.read`` and
    ``timeline``.
    """
    rows = source
    if isinstance(source, str | PathLike):
        rows = snapshot.timeline_rows(snapshot.read(source), phase=phase)
    rows = list(rows)
    if not rows:
        return panels.empty()
    names = _present(CATEGORIES, (c for row in rows for c in CATEGORIES if row[c]))
    totals = [sum(row[c] for c in CATEGORIES) for row in rows]
    peak = max(range(len(rows)), key=totals.__getitem__)
    kept = [rows[i] for i in _thin(totals, CORNERS // (len(names) or 1), _begins(rows))]
    unit, scale = ("GB", 1e9) if totals[peak] >= 1e9 else ("MB", MB)

    def draw(figure):
        ax = figure.subplots()
        times = [(row["time_us"] - rows[0]["time_us"]) / 1e3 for row in kept]
        stacks = [[row[c] / scale for row in kept] for c in names]
        ax.stackplot(times, stacks, colors=[CATEGORIES[c] for c in names], step="post",
                     linewidth=0)  # fmt: skip
        at = (rows[peak]["time_us"] - rows[0]["time_us"]) / 1e3
        high = totals[peak] / scale
        ax.plot([at], [high], marker="v", color=INK, markersize=6, clip_on=False)
        late = at > (times[-1] or 1) * 0.6
        ax.annotate(f"peak {high:.3g} {unit}", (at, high), xytext=(-7 if late else 7, 3),
                    textcoords="offset points", ha="right" if late else "left")  # fmt: skip
        if total_bytes:
            ax.axhline(total_bytes / scale, color=INK, linestyle="--", linewidth=1)
        _phases(ax, kept, times, high)
        ax.set_ylim(0, max(high * 1.22, 1.02 * (total_bytes or 0) / scale))
        ax.set_xlim(0, times[-1] or 1)
        ax.set_xlabel(along)
        ax.set_ylabel(f"allocated ({unit})")
        legend(figure, {c: CATEGORIES[c] for c in reversed(names)}, columns=2)

    return Chart(draw, height=3.4 + 0.22 * -(-len(names) // 2))


def _present(all_: Iterable[str], found: Iterable[str]) -> list[str]:
    found = set(found)
    return [name for name in all_ if name in found]


def _number(stream: str) -> tuple:
    return (0, int(stream), "") if str(stream).isdigit() else (1, 0, str(stream))


def _stream(name: str) -> str:
    return "launches" if name == HOST else f"stream {name}"


def _in_few_streams(rows: list[dict]) -> list[dict]:
    """The rows, and where they have many streams all but the busiest one packed: a stream goes to
    the first row that is idle from its first kernel to its last."""
    spans: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["start_us"]):
        end = row["start_us"] + row["duration_us"]
        if row["stream"] != HOST:
            span = spans.setdefault(row["stream"], [row["start_us"], end])
            span[1] = max(span[1], end)
    if len(spans) <= STREAMS:
        return rows
    del spans[max(spans, key=lambda stream: _time(rows, stream))]
    shared: list[list] = []  # when each is idle again, and its streams
    for stream, (start, end) in spans.items():
        free = next((one for one in shared if one[0] <= start), None)
        if free is None:
            shared.append([end, [stream]])
        else:
            free[0] = end
            free[1].append(stream)
    names = {stream: _named(streams) for _, streams in shared for stream in streams}
    return [row | {"stream": names.get(row["stream"], row["stream"])} for row in rows]


def _named(streams: list[str]) -> str:
    return streams[0] if len(streams) == 1 else f"{streams[0]} +{len(streams) - 1}"


def _time(rows: list[dict], stream: str) -> float:
    return sum(row["duration_us"] for row in rows if row["stream"] == stream)


def _bars(rows: list[dict], least: float) -> list[tuple[float, float]]:
    """(start, width), those closer than ``least`` in one."""
    bars: list[list[float]] = []
    for row in sorted(rows, key=lambda row: row["start_us"]):
        start, end = row["start_us"], row["start_us"] + row["duration_us"]
        if bars and start - bars[-1][1] < least:
            bars[-1][1] = max(bars[-1][1], end)
        else:
            bars.append([start, end])
    return [(start, end - start) for start, end in bars]


def _stroke(ax, bars: list[tuple[float, float]], y: float, colour: str) -> PathPatch:
    """The bars as one thick line with gaps, which takes far fewer letters than boxes."""
    corners = [(x, y) for start, width in bars for x in (start, start + width)]
    path = Path(corners or [(0, y)], [Path.MOVETO, Path.LINETO] * len(bars) or None)
    path.should_simplify = False
    return ax.add_patch(PathPatch(path, fill=False, color=colour, capstyle="butt"))


def _lane(ax, rows: list[dict], column: str, level: float, width: float) -> None:
    """One box for each stretch of kernels of one phase (or part), named where the name fits."""
    stretches: list[list] = []
    for row in sorted(rows, key=lambda row: row["start_us"]):
        end = row["start_us"] + row["duration_us"]
        if stretches and stretches[-1][0] == row[column]:
            stretches[-1][2] = max(stretches[-1][2], end)
        else:
            stretches.append([row[column], row["start_us"], end])
    boxes = [s for s in stretches if s[0] and s[2] - s[1] > width * LEAST]
    if not boxes:
        return
    ax.broken_barh([(start, end - start) for _, start, end in boxes], (level - 0.36, 0.72),
                   facecolor="#eeeeee", edgecolor=PAPER, linewidth=0.6)  # fmt: skip
    for name, start, end in boxes:
        if (end - start) / width > LETTER * len(name):
            ax.annotate(name, ((start + end) / 2, level), ha="center", va="center_baseline")


def _phases(ax, rows: list[dict], times: list[float], high: float) -> None:
    """A line where a phase begins, and its name where there is room."""
    begins = _begins(rows)
    for i, following in zip(begins, [*begins[1:], len(rows) - 1], strict=True):
        name = rows[i]["phase"].rpartition("/")[2]
        ax.axvline(times[i], color=DIM, linewidth=0.6)
        if times[-1] and (times[following] - times[i]) / times[-1] > LETTER * (len(name) + 1):
            ax.annotate(name, ((times[i] + times[following]) / 2, high * 1.14), ha="center")


def _begins(rows: list[dict]) -> list[int]:
    """Where a phase begins."""
    return [i for i, row in enumerate(rows) if not i or row["phase"] != rows[i - 1]["phase"]]


def _thin(totals: list[int], points: int, always: Iterable[int] = ()) -> list[int]:
    """At most about ``points`` indices: of each bin the first and the highest, the last of all, and
    those that are kept ``always``."""
    size = max(1, -(-2 * len(totals) // points))
    kept = {len(totals) - 1, *always}
    for first in range(0, len(totals), size):
        bin_ = range(first, min(first + size, len(totals)))
        kept |= {first, max(bin_, key=totals.__getitem__)}
    return sorted(kept)


def legend(figure, colours: dict[str, str], columns: int = 3) -> None:
    handles = [Patch(color=colour, label=name, linewidth=0) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False,
                  columnspacing=1.0, handlelength=1.0, handletextpad=0.5)  # fmt: skip

"""Drawings of parallelism: what each device holds, what is sent when, rings, and a map of the
bottleneck."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from a2lib.report.drawing import WIDTH, Drawing, box, stroke, text
from a2lib.report.plots import HEAT, label
from a2lib.report.style import COLOURS, DIM, chart
from a2lib.theory import parallelism, schedules
from a2lib.theory.other_axes import bubble_share
from a2lib.theory.parallelism import EXAMPLE
from a2lib.theory.schedules import COMPUTE, LINKS, Task, Timeline

LEFT = 66  # units for the names of streams
# Tensors that stay, tensors that are there for a while (gathered, or a partial sum), and tensors
# that are sent a second time.
HELD, SENT, PALE = "fill: #86b6e6", "fill: #f0ad78", "fill: #f6cfab"
NONE = "fill: none; stroke: #808080; stroke-width: 0.8"
FILLS = {"compute": HELD, "gather": SENT, "reduce": PALE, "scatter": PALE}
LETTERS = {"compute": "C", "gather": "G", "reduce": "R", "scatter": "S"}
LETTER = 8.3  # units that a box needs for each of its characters
DEVICES = 4
NAMES = [f"device {i}" for i in range(DEVICES)]
STREAMS = {COMPUTE: "computes", LINKS: "sends"}
HOLDS = {HELD: "always held", SENT: "there while it is used"}
COMMUNICATION_BINDS, COMPUTATION_BINDS, LINKS_DECIDE = HEAT[2], HEAT[5], HEAT[4]
Cells = Callable[[int], Iterable[tuple[int, int]]]
# The tensor's name, its cut (rows, columns), which cells a device has, and their style.
Row = tuple[str, tuple[int, int], Cells, str]


def clock(out: list[str], timeline: Timeline, y: float, seconds: float) -> float:
    """Add the rows of a timeline to ``out``, one per stream, from ``y`` down, as wide as
    ``seconds``; return where they end. A box has its task's letter and number where it is wide
    enough."""
    across, height = (WIDTH - LEFT - 6) / seconds, 22
    for stream, name in STREAMS.items():
        out.append(text(LEFT - 6, y + height / 2 + 4, name, anchor="end"))
        out.append(stroke(f"M{LEFT} {y + height + 2:g}H{WIDTH - 4}", "#dddddd"))
        for task in timeline.tasks:
            if task.stream != stream:
                continue
            x, wide = LEFT + timeline.start[task.name] * across, task.seconds * across
            kind, *rest = task.name.split()
            words = LETTERS[kind] + _short(rest) if kind in LETTERS else ""
            fits = wide >= LETTER * len(words)
            out.append(box(x + 0.5, y, max(wide - 1, 1), height, FILLS[kind], words * fits))
        y += height + 6
    return y


def _short(rest: list[str]) -> str:
    """Return layer and half-batch of a task as people write them: 1 0 becomes 2a."""
    return str(int(rest[0]) + 1) + ("ab"[int(rest[1])] if len(rest) > 1 else "")


def rings() -> Drawing:
    """Draw the two rings on one axis of time: the messages of each device, round by round.

    A box is as wide as its message takes; its number is that of the device whose tensor, or of the
    chunk of the sum, it carries. A tensor has n elements.
    """
    n = DEVICES
    unit = (WIDTH - LEFT - 10) / (n * (n - 1))
    out, y = [], 0.0
    for title, rounds, wide, reducing in (  # wide: elements of a message; reducing: rounds of sums
        ("whole tensors", n - 1, n, 0),
        (f"chunks of 1/{n}", 2 * (n - 1), 1, n - 1),
    ):
        out.append(text(LEFT, y + 14, f"{title}: {rounds} rounds", bold=True))
        y += 22
        for device in range(n):
            out.append(text(LEFT - 6, y + 15, f"device {device}", anchor="end"))
            for t in range(rounds):
                x = LEFT + t * wide * unit
                kind = "reduce" if t < reducing else "gather"
                # A device reduces its own chunk first, and gathers that of the next device first.
                begins_at = device + 1 + reducing if 0 < reducing <= t else device
                number = str((begins_at - t) % n)
                out.append(box(x + 0.5, y, wide * unit - 1, 20, FILLS[kind], number))
            y += 24
        end = f"M{LEFT + rounds * wide * unit:g} {y - 4:g}v-{24 * n:g}"
        out.append(stroke(end, "#555555", more="; stroke-dasharray: 3 3"))
        y += 6
    return Drawing(out, y)


def own_row(i: int) -> list[tuple[int, int]]:
    return [(i, 0)]


def own_column(i: int) -> list[tuple[int, int]]:
    return [(0, i)]


def every_row(_: int) -> list[tuple[int, int]]:
    return [(r, 0) for r in range(DEVICES)]


def _holdings(out: list[str], rows: list[Row]) -> float:
    """Add a column per device and a row per tensor, whose filled cells are what the device has;
    return where they end."""
    column, y = (WIDTH - LEFT) / DEVICES, 18
    for i, name in enumerate(NAMES):
        out.append(text(LEFT + (i + 0.45) * column, 11, name, anchor="middle"))
    for name, (down, across), cells, style in rows:
        lines = name.split("\n")
        for k, line in enumerate(lines):
            out.append(text(LEFT - 6, y + 22 + 14 * (k - (len(lines) - 1) / 2), line, anchor="end"))
        for i in range(DEVICES):
            filled = set(cells(i))
            high, wide = 36 / down, 56 / across
            for r in range(down):
                for c in range(across):
                    x = LEFT + i * column + 4 + c * wide
                    kind = style if (r, c) in filled else NONE
                    out.append(box(x, y + r * high, wide - 1.5, high - 1.5, kind))
        y += 44
    return y


def _legend(out: list[str], words: dict[str, str], y: float) -> float:
    """Add a line per style with its meaning, from ``y`` down; return where they end."""
    for style, meaning in words.items():
        out += [box(LEFT, y, 16, 12, style), text(LEFT + 24, y + 11, meaning)]
        y += 19
    return y


def _drawing(
    rows: list[Row],
    schedule: dict[str, list[Task]],
    meanings: dict[str, str],
    letters: Sequence[str],
) -> Drawing:
    """Draw what each device holds, and below it the passes of a few layers on one scale."""
    out: list[str] = []
    y = _legend(out, meanings, _holdings(out, rows)) + 8
    runs = {title: schedules.run(tasks) for title, tasks in schedule.items()}
    longest = max(timeline.seconds for timeline in runs.values())
    for title, timeline in runs.items():
        out.append(text(LEFT, y + 10, title, bold=True))
        y = clock(out, timeline, y + 16, longest) + 6
    out += [text(LEFT, y + 11 + 17 * k, line) for k, line in enumerate(letters)]
    return Drawing(out, y + 17 * len(letters) + 2)


def fully_sharded() -> Drawing:
    """Draw FSDP: a quarter of everything, and a layer's weights gathered while they are used."""
    rows = [
        ("batch", (4, 1), own_row, HELD),
        ("weights", (4, 1), own_row, HELD),
        ("one layer,\nin use", (4, 1), every_row, SENT),
        ("gradients,\nmoments", (4, 1), own_row, HELD),
    ]
    passes = {"forward": schedules.fsdp(4, 1.0, 0.7), "backward": schedules.fsdp(4, 2.0, 0.7, 0.7)}
    letters = "G: all-gather of a layer's weights", "S: reduce-scatter of its gradients"
    return _drawing(rows, passes, HOLDS, letters)


def tensor_parallel() -> Drawing:
    """Draw tensor parallelism: every token on every device, and a quarter of each matrix."""
    rows = [
        ("x, y", (1, 1), lambda i: [(0, 0)], HELD),
        ("W1, W2", (1, 4), own_column, HELD),
        ("W3", (4, 1), own_row, HELD),
        ("x1, x2, z", (1, 4), own_column, HELD),
    ]
    passes = {
        "forward": schedules.tensor(2, 2.0, 1.6, 2),
        "backward": schedules.tensor(2, 4.0, 1.6, 2),
    }
    letters = "R: all-reduce, of y forward, of dx backward", "a, b: halves of the batch"
    return _drawing(rows, passes, {HELD: "held"}, letters)


def sequence_parallel() -> Drawing:
    """Draw sequence parallelism: rows of tokens between the matmuls, columns within them, and all
    rows while a matmul runs."""
    rows = [
        ("stream,\nnorm", (4, 1), own_row, HELD),
        ("gathered", (4, 1), every_row, SENT),
        ("heads,\nhidden", (1, 4), own_column, HELD),
        ("partial\nsums", (4, 1), every_row, SENT),
        ("stream", (4, 1), own_row, HELD),
    ]
    out: list[str] = []
    meanings = {HELD: "saved for the backward", SENT: "there for one matmul"}
    return Drawing(out, _legend(out, meanings, _holdings(out, rows)))


def one_forward_one_backward(stages: int, microbatches: int) -> list[tuple[int, int, str, float]]:
    """Return (stage, micro-batch, "forward" or "backward", start) of each task of the schedule
    1F1B, where a forward takes a unit of time and a backward two."""
    waiting = []  # the tasks of each stage in their order
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)  # forwards before the first backward
        order = [("forward", i) for i in range(ahead)]
        for i in range(microbatches):
            order.append(("backward", i))
            if ahead + i < microbatches:
                order.append(("forward", ahead + i))
        waiting.append(order)

    ends, free, tasks = {}, [0.0] * stages, []
    while any(waiting):
        for stage, order in enumerate(waiting):
            if not order:
                continue
            kind, i = order[0]
            before = stage - 1 if kind == "forward" else stage + 1
            at_the_end = before < 0 or before == stages  # nothing to receive there
            if not at_the_end and (kind, before, i) not in ends:
                continue
            start = free[stage] if at_the_end else max(free[stage], ends[kind, before, i])
            free[stage] = ends[kind, stage, i] = start + (1 if kind == "forward" else 2)
            tasks.append((stage, i, kind, start))
            order.pop(0)
    return tasks


def pipelines() -> Drawing:
    """Draw 1F1B with as many micro-batches as stages, and with twice as many, on one scale."""
    stages, out, y = DEVICES, [], 0.0
    unit = (WIDTH - LEFT - 6) / (3 * (2 * stages + stages - 1))
    for microbatches in (stages, 2 * stages):
        bubble = bubble_share("1f1b", stages, microbatches)
        length = 3 * (microbatches + stages - 1) * unit
        title = f"{microbatches} micro-batches: idle for {100 * bubble:.0f} %"
        out.append(text(LEFT, y + 12, title, bold=True))
        y += 20
        for stage in range(stages):
            out.append(text(LEFT - 6, y + 24 * stage + 15, f"stage {stage}", anchor="end"))
            out.append(box(LEFT, y + 24 * stage, length, 20, "fill: #eeeeee"))
        for stage, i, kind, start in one_forward_one_backward(stages, microbatches):
            wide, style = (unit, HELD) if kind == "forward" else (2 * unit, PALE)
            place = (LEFT + start * unit + 0.5, y + 24 * stage, wide - 1, 20)
            out.append(box(*place, style, str(i)))
        y += 24 * stages + 8
    meanings = {HELD: "forward of a micro-batch", PALE: "its backward", "fill: #eeeeee": "idle"}
    return Drawing(out, _legend(out, meanings, y))


def experts_and_contexts() -> Drawing:
    """Draw, above, whose tokens travel to which expert's device, and below the rounds of ring
    attention."""
    n, side, out, y = DEVICES, 44, [], 12.0
    parts = {HELD: f"{n} parts stay", SENT: f"{n * (n - 1)} parts are sent, and their results back"}
    passed = {HELD: "its own", SENT: "received from the device before it"}
    for title, row, cell, meanings in (
        ("experts: tokens of device i for device j", "device {}", "{i} to {j}", parts),
        ("context: keys and values seen, by round", "queries {}", "KV {from_}", passed),
    ):
        out.append(text(LEFT, y, title, bold=True))
        y += 10
        for i in range(n):
            out.append(text(LEFT - 6, y + 16, row.format(i), anchor="end"))
            for j in range(n):
                x = LEFT + j * (side + 4)
                stays = j == (i if meanings is parts else 0)
                words = cell.format(i=i, j=j, from_=(i - j) % n)
                out.append(box(x, y, side, 22, HELD if stays else SENT, words))
            y += 26
        y = _legend(out, meanings, y + 2) + 16
    return Drawing(out, y - 14)


@chart(height=4.2)
def mesh_map(figure):
    """Draw the bottleneck of the example's forward over the devices of each axis, and the most
    devices if the axes share links (circle) and if each has its own (square)."""
    a, b = float(parallelism.data_slope(EXAMPLE)), float(parallelism.tensor_slope(EXAMPLE))
    right, top = 4 * (1 + a), 4 * (1 + b)
    ax = figure.add_subplot()
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlim=(1, right), ylim=(1, top), facecolor=COMMUNICATION_BINDS)
    ax.grid(False)
    x = np.geomspace(1, 1 + a, 200)
    ax.fill_between([1, 1 + a], 1, 1 + b, color=LINKS_DECIDE, linewidth=0)
    shared = np.maximum(1 + b * (1 - (x - 1) / a), 1)
    ax.fill_between(x, 1, shared, color=COMPUTATION_BINDS, linewidth=0)
    wide = np.geomspace(1, right, 60)
    for n in (8, 32, 128, 512):
        ax.plot(wide, n / wide, color=DIM, linewidth=0.8, linestyle=":")
        height = 3 if n < 1 + b else 2.4 * (1 + b)
        words = f"{n} devices" if n == 8 else f"{n}"
        label(ax, words, (n / height, height), (3, 3), color=DIM)
    for point, marker in ((parallelism.shared_mesh_split(EXAMPLE), "o"), ((1 + a, 1 + b), "s")):
        ax.plot(*point, marker=marker, color=COLOURS[0], markersize=8, zorder=5)
        most = f"{point[0] * point[1]:.0f}"
        label(ax, most, point, (7, 5), fontweight="bold")
    ax.text(1.15, 1.1, "compute-bound", va="bottom")
    ax.text(1.06 * (1 + a), 1.2, "bottleneck:\nFSDP's\nall-gathers", va="bottom")
    ax.text(1.15, 3.2 * (1 + b), "bottleneck: tensor parallelism's all-reduces")
    line = {"arrowstyle": "-", "color": DIM, "linewidth": 0.8}
    inside = (0.75 * (1 + a), 0.75 * (1 + b))
    words = "compute-bound only if\neach axis has its own links"
    ax.annotate(words, inside, (1.15, 1.35 * (1 + b)), va="bottom", arrowprops=line)
    ax.set(xlabel="FSDP devices", ylabel="tensor-parallel devices")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")

"""Schedules drawn as they ran on the clock of a2lib.theory.schedules, and the two rings' rounds."""

from __future__ import annotations

from collections.abc import Sequence

from a2lib.report.drawing import WIDTH, Drawing, box, stroke, text
from a2lib.theory import schedules
from a2lib.theory.collectives import run_all_reduce, run_alternate
from a2lib.theory.other_axes import bubble_share
from a2lib.theory.schedules import Task, Timeline

LEFT = 66  # units for the names of streams
FILLS = {
    "compute": "fill: #86b6e6", "gather": "fill: #f0ad78", "reduce": "fill: #f6cfab",
    "scatter": "fill: #f6cfab", "send": "fill: #f6cfab", "F": "fill: #86b6e6",
    "B": "fill: #f0ad78", "f": "fill: #dce9f7", "b": "fill: #fbe9da",
}  # fmt: skip
LETTERS = {"compute": "C", "gather": "G", "reduce": "R", "scatter": "S", "send": "K"}
LETTER = 8.3  # units that a box needs for each of its characters


def clock(timeline: Timeline, y: float, names: dict[str, str], width: float | None = None,
          height: float = 22, seconds: float | None = None) -> tuple[list[str], float]:  # fmt: skip
    """The rows of a timeline, one per stream in ``names``, from ``y`` down; and where they end.

    A box has its task's letter and number where it is wide enough.
    """
    across = (width or WIDTH - LEFT - 6) / (seconds or timeline.seconds)
    out = []
    for stream, name in names.items():
        out.append(text(LEFT - 6, y + height / 2 + 4, name, anchor="end"))
        out.append(stroke(f"M{LEFT} {y + height + 2:g}H{WIDTH - 4}", "#dddddd"))
        for task in timeline.tasks:
            if task.stream != stream:
                continue
            x, wide = LEFT + timeline.start[task.name] * across, task.seconds * across
            kind, *rest = task.name.split()
            out.append(box(x + 0.5, y, max(wide - 1, 1), height, FILLS[kind]))
            words = LETTERS.get(kind, "") + _short(rest)
            if kind in LETTERS and wide >= LETTER * len(words):
                out.append(text(x + wide / 2, y + height / 2 + 4, words, anchor="middle"))
        y += height + 6
    return out, y


def _short(rest: list[str]) -> str:
    """Layer and part of a task: 1 0 -> 2a."""
    return str(int(rest[0]) + 1) + ("ab"[int(rest[1])] if len(rest) > 1 else "")


def passes(forward: list[Task], backward: list[Task] | None, names: dict[str, str], y: float,
           titles: Sequence[str] = ("forward", "backward")) -> tuple[list[str], float]:  # fmt: skip
    """Forward and backward of a few layers, drawn to one scale."""
    runs = [schedules.run(tasks) for tasks in (forward, backward) if tasks]
    longest = max(one.seconds for one in runs)
    out = []
    for title, one in zip(titles, runs, strict=False):
        out.append(text(LEFT, y + 10, title, bold=True))
        rows, y = clock(one, y + 16, names, seconds=longest)
        out += rows
        y += 6
    return out, y


def rings(n: int = 4) -> Drawing:
    """The two rings on one axis of time, device by device: what each sends, round by round.

    A box is as wide as its message takes; its number is the device whose tensor, or the chunk of
    the sum, goes. Drawn from the rings run on n tensors of n elements.
    """
    given = [[10**i] * n for i in range(n)]
    whole, chunked = run_alternate(given), run_all_reduce(given)
    unit = (WIDTH - LEFT - 10) / max(whole.elements, chunked.elements)
    out, y = [], 0.0
    for title, run, wide, first in (
        (f"whole tensors: {whole.rounds} rounds", whole, n, None),
        (f"chunks of 1/{n}: {chunked.rounds} rounds", chunked, 1, n - 1),
    ):
        out.append(text(LEFT, y + 14, title, bold=True))
        y += 22
        for device in range(n):
            out.append(text(LEFT - 6, y + 15, f"device {device}", anchor="end"))
            for t in range(run.rounds):
                x = LEFT + t * wide * unit
                if first is None:
                    number, kind = (device - t) % n, "gather"
                elif t < first:
                    number, kind = (device - t) % n, "reduce"
                else:
                    number, kind = (device + 1 - (t - first)) % n, "gather"
                out.append(box(x + 0.5, y, wide * unit - 1, 20, FILLS[kind]))
                out.append(text(x + wide * unit / 2, y + 14, str(number), anchor="middle"))
            y += 24
        end = LEFT + run.elements * unit
        dashes = "; stroke-dasharray: 3 3"
        out.append(stroke(f"M{end:g} {y - 4:g}v-{24 * n:g}", "#555555", more=dashes))
        y += 6
    counts = {"whole": whole.elements, "chunked": chunked.elements}
    return Drawing(out, y, counts)


PIPES = (
    ("gpipe", 1, "GPipe"),
    ("1f1b", 1, "1F1B"),
    ("interleaved", 2, "interleaved"),
)


def pipelines(stages: int = 4, microbatches: int = 8) -> Drawing:
    """Three pipelines on one axis of time, with their bubbles; the bubble is the paper's colour."""
    runs = [
        (title, kind, chunks, schedules.run(schedules.pipeline(kind, stages, microbatches, chunks)))
        for kind, chunks, title in PIPES
    ]
    longest = max(one.seconds for *_, one in runs)
    across = (WIDTH - LEFT - 6) / longest
    out, y, counts = [], 0.0, {}
    for title, kind, chunks, one in runs:
        share = bubble_share(kind, stages, microbatches, chunks)
        held = schedules.held_by_stage(one, 0, stages) / chunks
        counts[kind] = round(100 * share)
        words = f"{title}: bubble {100 * share:.0f} %, holds {held:g}"
        out.append(text(LEFT, y + 12, words, bold=True))
        y += 18
        for stage in range(stages):
            out.append(text(LEFT - 6, y + 12, f"stage {stage + 1}", anchor="end"))
            for task in one.tasks:
                if task.stream != f"stage {stage}":
                    continue
                way, piece, _ = task.name.split()
                later = int(piece) >= stages
                x = LEFT + one.start[task.name] * across
                fill = FILLS[way.lower() if later else way]
                style = fill + "; stroke: #555555; stroke-width: 0.5"
                out.append(box(x, y, task.seconds * across, 15, style))
            y += 18
        y += 6
    for style, words in (("F", "forward"), ("B", "backward, twice as long"),
                         ("f", "forward of the second piece"),
                         ("b", "backward of the second piece")):  # fmt: skip
        edge = FILLS[style] + "; stroke: #555555; stroke-width: 0.5"
        out += [box(LEFT, y, 16, 13, edge), text(LEFT + 24, y + 11, words)]
        y += 19
    return Drawing(out, y, counts)

"""One drawing per scheme: who holds what, on four devices, and what moves when."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from a2lib.report.chapters.parallelism.clocks import LEFT, passes
from a2lib.report.drawing import WIDTH, Drawing, box, text
from a2lib.theory import schedules
from a2lib.theory.schedules import COMPUTE, LINKS

DEVICES = 4
HELD = "fill: #86b6e6"
SENT = "fill: #f0ad78"  # there for a while: gathered, or a partial sum
NONE = "fill: none; stroke: #808080; stroke-width: 0.8"
Cells = Callable[[int], Iterable[tuple[int, int]]]


def _holdings(rows: list[tuple[str, tuple[int, int], Cells, str]], y: float,
              names: list[str] | None = None) -> tuple[list[str], float]:  # fmt: skip
    """A column per device and a row per tensor, cut into cells of which the device has some.

    A row: the tensor's name, its cut (rows, columns), which cells a device has, and their style.
    """
    column = (WIDTH - LEFT) / DEVICES
    names = names or [f"device {i}" for i in range(DEVICES)]
    out = [text(LEFT + (i + 0.45) * column, y + 11, names[i], anchor="middle")
           for i in range(DEVICES)]  # fmt: skip
    y += 18
    for name, (down, across), cells, style in rows:
        lines = name.split("\n")
        for k, line in enumerate(lines):
            out.append(text(LEFT - 6, y + 22 + 14 * (k - (len(lines) - 1) / 2), line, anchor="end"))
        for i in range(DEVICES):
            own = set(cells(i))
            high, wide = 36 / down, 56 / across
            for r in range(down):
                for c in range(across):
                    x = LEFT + i * column + 4 + c * wide
                    kind = style if (r, c) in own else NONE
                    out.append(box(x, y + r * high, wide - 1.5, high - 1.5, kind))
        y += 44
    return out, y


def _legend(words: dict[str, str], y: float) -> tuple[list[str], float]:
    out = []
    for style, meaning in words.items():
        out += [box(LEFT, y, 16, 12, style), text(LEFT + 24, y + 11, meaning)]
        y += 19
    return out, y


def _letters(lines: list[str], y: float) -> tuple[list[str], float]:
    out = []
    for line in lines:
        out.append(text(LEFT, y + 11, line))
        y += 17
    return out, y


def _drawing(rows, names, forward, backward, streams, meanings, letters) -> Drawing:
    out, y = _holdings(rows, 0, names)
    more, y = _legend(meanings, y)
    out += more
    more, y = passes(forward, backward, streams, y + 8)
    out += more
    more, y = _letters(letters, y)
    return Drawing([*out, *more], y + 2, {"rows": len(rows)})


STREAMS = {COMPUTE: "computes", LINKS: "sends"}
HOLDS = {HELD: "always held", SENT: "there while it is used"}


def data_parallel() -> Drawing:
    """Everything on every device but the batch; gradients are summed while the backward goes on."""
    compute = [schedules.Task(f"compute {i}", COMPUTE, 1.0) for i in range(4)]
    return _drawing(
        [("batch", (4, 1), lambda i: [(i, 0)], HELD),
         ("weights", (1, 1), lambda i: [(0, 0)], HELD),
         ("gradients,\nmoments", (1, 1), lambda i: [(0, 0)], HELD)],
        None, compute, schedules.data_parallel_backward(4, 2.0, 1.4), STREAMS, {HELD: "held"},
        ["C: a layer's products, in the order of the pass", "R: all-reduce of its gradients"],
    )  # fmt: skip


def fully_sharded() -> Drawing:
    """A quarter of everything; a layer's weights are gathered for the time they are used."""
    return _drawing(
        [("batch", (4, 1), lambda i: [(i, 0)], HELD),
         ("weights", (4, 1), lambda i: [(i, 0)], HELD),
         ("one layer,\nin use", (4, 1), lambda i: [(r, 0) for r in range(4)], SENT),
         ("gradients,\nmoments", (4, 1), lambda i: [(i, 0)], HELD)],
        None, schedules.fsdp_forward(4, 1.0, 0.7), schedules.fsdp_backward(4, 2.0, 0.7, 0.7),
        STREAMS, HOLDS,
        ["G: all-gather of a layer's weights", "S: reduce-scatter of its gradients"],
    )  # fmt: skip


def tensor_parallel() -> Drawing:
    """Every token on every device, a quarter of each matrix; sums of activations move."""
    return _drawing(
        [("x, y", (1, 1), lambda i: [(0, 0)], HELD),
         ("W1, W2", (1, 4), lambda i: [(0, i)], HELD),
         ("W3", (4, 1), lambda i: [(i, 0)], HELD),
         ("x1, x2, z", (1, 4), lambda i: [(0, i)], HELD)],
        None, schedules.tensor_forward(2, 2.0, 1.6, 2), schedules.tensor_forward(2, 4.0, 1.6, 2),
        STREAMS, {HELD: "held"},
        ["R: all-reduce, of y forward, of dx backward", "a, b: halves of the batch"],
    )  # fmt: skip


def mesh() -> Drawing:
    """Two by two: half of the batch, a quarter of each matrix, half of it while in use."""
    fsdp, tp = (lambda i: i // 2), (lambda i: i % 2)
    return _drawing(
        [("batch", (2, 1), lambda i: [(fsdp(i), 0)], HELD),
         ("W1, W2", (2, 2), lambda i: [(fsdp(i), tp(i))], HELD),
         ("in use", (2, 2), lambda i: [(r, tp(i)) for r in range(2)], SENT),
         ("W3", (2, 2), lambda i: [(tp(i), fsdp(i))], HELD),
         ("x1, x2, z", (2, 2), lambda i: [(fsdp(i), tp(i))], HELD)],
        [f"{fsdp(i)}, {tp(i)}" for i in range(DEVICES)],
        schedules.mesh_forward(3, 2.0, 1.6, 1.6, 2, shared=False), None,
        {COMPUTE: "computes", "gathers": "FSDP axis", "sums": "TP axis"}, HOLDS,
        ["devices: FSDP index, TP index", "G: gather among those of one TP index",
         "R: sum among those of one FSDP index"],
    )  # fmt: skip


def other_axes() -> Drawing:
    """What a pipeline, experts and contexts cut, and what each device then holds."""

    def rows(n):
        return lambda i: [(r, 0) for r in range(n(i))]

    def own(i):
        return [(i, 0)]

    def whole(i):
        return [(0, 0)]

    held = [schedules.held_by_stage(schedules.run(schedules.pipeline("1f1b", DEVICES, 8)), i,
                                    DEVICES) for i in range(DEVICES)]  # fmt: skip
    parts = {
        "pipeline: cuts the layers": [
            ("layers,\nstate", (4, 1), own, HELD),
            ("micro-\nbatches", (4, 1), rows(held.__getitem__), SENT),
        ],
        "experts: cuts batch and experts": [
            ("batch", (4, 1), own, HELD),
            ("experts", (1, 4), lambda i: [(0, i)], HELD),
            ("other\nweights", (1, 1), whole, HELD),
        ],
        "context: cuts each sequence": [
            ("sequence", (1, 4), lambda i: [(0, i)], HELD),
            ("keys,\nvalues", (1, 4), lambda i: [(0, i), (0, (i - 1) % DEVICES)], SENT),
            ("weights", (1, 1), whole, HELD),
        ],
    }
    out, y = [], 0.0
    for title, tensors in parts.items():
        out.append(text(LEFT, y + 12, title, bold=True))
        more, y = _holdings(tensors, y + 18)
        out += more
        y += 10
    more, y = _legend(HOLDS, y)
    return Drawing([*out, *more], y + 2, {"held": sum(held)})


def experts_and_contexts() -> Drawing:
    """Above, whose tokens travel to which expert's device; below, the rounds of ring attention."""
    n = DEVICES
    out = [text(LEFT, 12, "experts: tokens of device i for device j", bold=True)]
    y, side = 22.0, 44
    counts = {"kept": 0, "sent": 0}
    for i in range(n):
        out.append(text(LEFT - 6, y + 16, f"device {i}", anchor="end"))
        for j in range(n):
            kind = "kept" if i == j else "sent"
            counts[kind] += 1
            x = LEFT + j * (side + 4)
            out.append(box(x, y, side, 22, HELD if i == j else SENT))
            out.append(text(x + side / 2, y + 15, f"{i} to {j}", anchor="middle"))
        y += 26
    sent = f"{counts['sent']} parts are sent, and their results back"
    more, y = _legend({HELD: f"{counts['kept']} parts stay", SENT: sent}, y + 2)
    out += more
    y += 12
    out.append(text(LEFT, y + 8, "context: keys and values seen, by round", bold=True))
    y += 16
    for i in range(n):
        out.append(text(LEFT - 6, y + 16, f"queries {i}", anchor="end"))
        for t in range(n):
            x = LEFT + t * (side + 4)
            out.append(box(x, y, side, 22, HELD if t == 0 else SENT))
            out.append(text(x + side / 2, y + 15, f"KV {(i - t) % n}", anchor="middle"))
        y += 26
    more, y = _legend({HELD: "its own", SENT: "received from the device before it"}, y + 2)
    return Drawing([*out, *more], y + 2, counts)

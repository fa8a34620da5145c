"""Drawings of FlashAttention: the merge of two tiles, causal tiles, sweeps, warp roles in time."""

import math

from a2lib.report.drawing import WIDTH, Drawing, box, stroke, text

KINDS = {
    "full": "fill: #86b6e6",
    "mask": "fill: #f0ad78",
    "skip": "fill: none; stroke: #555555; stroke-dasharray: 3 3",
}
SCORES = ((1, 3, 2, 0), (4, 1, 4, 2))  # of the row that merge() draws, tile by tile
OPEN = "fill: none; stroke: #555555"


def state(scores) -> tuple[float, float]:
    """Return the largest score and the sum of exponentials relative to it: m and l."""
    return max(scores), sum(math.exp(s - max(scores)) for s in scores)


def merge() -> Drawing:
    """Draw a row of scores in two tiles, each with its m, l and a, and what becomes of the two."""
    out, side = [], 32
    for x, scores, name, fill, arrow in (
        (24, SCORES[0], "A", "full", "M88 122L108 145M96 143l12 2l-1 -12"),
        (212, SCORES[1], "B", "mask", "M276 122L256 145M258 135l-2 10l11 -2"),
    ):
        out.append(text(x + 2 * side, 14, f"tile {name} of the row", anchor="middle", bold=True))
        for j, score in enumerate(scores):
            out.append(box(x + j * side, 24, side - 2, side - 2, KINDS[fill]))
            out.append(text(x + (j + 0.5) * side, 44, str(score), anchor="middle"))
        m, total = state(scores)
        out += [
            text(x, 78, f"m = {m}, the largest"),
            text(x, 96, f"ℓ = {total:.2f}, the sum"),
            text(x, 114, "a = Σ exp(s − m) v"),
            stroke(arrow, width=1.6),
        ]
    (m_a, l_a), (m_b, l_b) = map(state, SCORES)
    m, total = state(SCORES[0] + SCORES[1])
    shrink = math.exp(m_a - m)
    assert math.isclose(shrink * l_a + math.exp(m_b - m) * l_b, total)
    merged = {
        164: f"m = max({m_a}, {m_b}) = {m}",
        183: f"ℓ = exp({m_a} − {m}) · {l_a:.2f} + {l_b:.2f} = {total:.2f}",
        202: f"a = exp({m_a} − {m}) · a(A) + a(B)",
        232: "as if the row had been seen whole",
    }
    out += [text(WIDTH / 2, y, words, anchor="middle") for y, words in merged.items()]
    return Drawing([*out, box(58, 148, WIDTH - 116, 64, OPEN)], 242)


def sweeps() -> Drawing:
    """Draw the backward of five by five causal tiles: in one sweep, programs add to the same dQ; in
    two, each gradient has a program of its own."""
    n, size, dashes, out = 5, 18, "; stroke-dasharray: 4 2", []
    panels = (
        (10, "one sweep", "dK, dV", "down", "5 matmuls per tile"),
        (136, "two sweeps:", "dQ", "across", "3 matmuls"),
        (254, "", "dK, dV", "down", "+ 4 matmuls"),
    )
    for x, title, owner, way, cost in panels:
        out.append(text(x, 14, title, bold=True))
        for i in range(n):
            for j in range(i + 1):
                kind = "mask" if (j == 1 if way == "down" else i == 3) else "full"
                out.append(box(x + j * size, 26 + i * size, 16, 16, KINDS[kind]))
        bottom = 26 + n * size
        if way == "down":
            out.append(stroke(f"M{x + 26:g} 30v{n * size - 12:g}l-4 -7m4 7l4 -7"))
        else:
            path = f"M{x + 3:g} {26 + 3.5 * size - 1:g}h{4 * size - 12:g}l-7 -4m7 4l-7 4"
            out.append(stroke(path))
        out += [text(x, bottom + 16, f"makes {owner}"), text(x, bottom + 34, cost)]
        if title == "one sweep":
            for i in range(1, n):
                out.append(stroke(f"M{x + 34:g} {35 + i * size:g}h62", "#d55e00", 1.4, dashes))
            out.append(text(x + 50, 50, "adds to dQ"))
            out.append(text(x, bottom + 52, "dQ: atomic adds"))
        elif title:
            out.append(text(x, bottom + 52, "each gradient: one writer"))
    return Drawing(out, 26 + n * size + 60)


def splits() -> Drawing:
    """Draw how few causal tiles are split: the keys of a row forward, the queries of a column
    backward, each among two programs."""
    n, size = 6, 18
    out = []
    panels = ((10, "forward: by keys"), (196, "backward: by queries"))
    for x, title in panels:
        out.append(text(x, 14, title, bold=True))
        for i in range(n):
            for j in range(i + 1):
                by_keys = x == panels[0][0]
                is_owned = i == n - 1 if by_keys else j == 0
                is_first = (j if by_keys else i) < n // 2
                kind = "skip" if not is_owned else "mask" if is_first else "full"
                out.append(box(x + j * size, 26 + i * size, 16, 16, KINDS[kind]))
    bottom = 26 + n * size
    for x, words in ((10, "programs share a row"), (196, "programs share a column")):
        out.append(text(x, bottom + 16, words))
    out.append(text(10, bottom + 34, "merged by a second kernel"))
    out.append(text(196, bottom + 34, "gradients added in fp32"))
    return Drawing(out, bottom + 42)


def tiles() -> Drawing:
    """Draw which of eight by eight tiles of causal scores the kernel computes: queries go down and
    keys across. A masked tile, which the diagonal crosses, has a stroke as well as a colour."""
    rows, left, top, size = 8, 64, 34, 28.0
    counts = dict.fromkeys(KINDS, 0)
    out = [
        text(left + rows * size / 2, 14, "keys: a program walks across", anchor="middle"),
        text(
            14, top + rows * size / 2, "queries: a program per tile", anchor="middle", turned=True
        ),
    ]
    for i in range(rows):
        y = top + i * size
        for j in range(rows):
            kind = "skip" if j > i else "mask" if j == i else "full"
            counts[kind] += 1
            out.append(_tile(kind, left + j * size, y, size))
    y = top + rows * size + 22
    legend = {
        "full": f"{counts['full']} whole: no mask needed",
        "mask": f"{counts['mask']} on the diagonal: masked inside",
        "skip": f"{counts['skip']} of {rows**2} never computed",
    }
    for kind, words in legend.items():
        out += [_tile(kind, left, y - 12, 16), text(left + 24, y, words)]
        y += 21
    return Drawing(out, y - 4)


def _tile(kind: str, x: float, y: float, size: float) -> str:
    side = size - 2
    line = stroke(f"M{x:g} {y:g}l{side:g} {side:g}") if kind == "mask" else ""
    return box(x, y, side, side, KINDS[kind]) + line


# Warp roles: consumer 1, consumer 2, the producer warp and the TMA.
ROLES = {
    "one": "fill: #f0ad78; stroke: #ffffff",
    "two": "fill: #86b6e6; stroke: #ffffff",
    "load": "fill: #dddddd; stroke: #ffffff",
}
# Each lane: its name, and boxes of (begin, end, words, role). Matmuls of one block of keys j are S
# (scores) and PV; e are its exponentials.
FORWARD_LANES = (
    ("producer warp", ((0, 2.2, "K₂, V₂", "load"), (4, 6.2, "K₃, V₃", "load"))),
    (
        "tensor cores",
        (
            (0, 1, "S₁", "one"),
            (1, 2, "PV₀", "one"),
            (2, 3, "S₁", "two"),
            (3, 4, "PV₀", "two"),
            (4, 5, "S₂", "one"),
            (5, 6, "PV₁", "one"),
            (6, 7, "S₂", "two"),
            (7, 8, "PV₁", "two"),
        ),
    ),
    ("consumer 1", ((1, 3.7, "softmax 1", "one"), (5, 7.7, "softmax 2", "one"))),
    ("consumer 2", ((0, 1.7, "soft. 0", "two"), (3, 5.7, "softmax 1", "two"))),
)
BACKWARD_LANES = (
    ("producer warp", ((0, 2.2, "Q₂, dO₂", "load"),)),
    (
        "tensor cores",
        (
            (0, 1, "S₁", "one"),
            (1, 2, "dQ₀", "one"),
            (3, 4, "dP₁", "one"),
            (4, 5, "dV", "one"),
            (6, 7, "dK", "one"),
        ),
    ),
    (
        "consumer 1",
        (
            (1, 2.1, "P₁", "one"),
            (2.1, 3, "dQ₀", "one"),
            (4, 5.9, "dS₁", "one"),
        ),
    ),
    ("TMA", ((3, 5, "add dQ₀", "load"),)),
)


def forward_roles() -> Drawing:
    """Draw who does what in the forward: a producer warp and two consumers, along the time."""
    return _lanes(FORWARD_LANES, ("consumer 1", "consumer 2"))


def backward_roles() -> Drawing:
    """Draw who does what in the backward, of the two consumers the first, along the time."""
    return _lanes(BACKWARD_LANES, ("consumer 1",))


def _lanes(lanes, consumers) -> Drawing:
    """Draw boxes along the time, a lane for each name."""
    left, unit, height = 96, 33, 26
    out = []
    for i, (name, boxes) in enumerate(lanes):
        y = 6 + i * (height + 8)
        out.append(text(left - 8, y + height / 2 + 4, name, anchor="end", bold=name in consumers))
        for begin, end, words, role in boxes:
            width = (end - begin) * unit
            out.append(box(left + begin * unit, y, width, height, ROLES[role], words))
    bottom = 6 + len(lanes) * (height + 8) + 6
    out.append(stroke(f"M{left} {bottom}H{WIDTH - 4}l-7 -4m7 4l-7 4"))
    out.append(text(left - 8, bottom + 4, "time", anchor="end"))
    return Drawing(out, bottom + 12)

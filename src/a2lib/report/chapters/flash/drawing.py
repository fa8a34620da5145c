"""What the chapter draws: the tiles of a causal mask."""

from __future__ import annotations

from a2lib.report.drawing import Drawing, box, stroke, text

KINDS = {
    "full": "fill: #86b6e6",
    "mask": "fill: #f0ad78",
    "skip": "fill: none; stroke: #555555; stroke-dasharray: 3 3",
}


def tile_kind(i: int, j: int, bq: int, bk: int) -> str:
    """What a causal mask leaves of query tile i against key tile j: full, mask (a part) or skip."""
    if j * bk > i * bq + bq - 1:
        return "skip"
    return "full" if j * bk + bk - 1 <= i * bq else "mask"


def tiles(n: int = 512, bq: int = 64, bk: int = 64) -> Drawing:
    """Which tiles of the N x N scores of causal attention the kernel computes.

    Query tiles of `bq` rows go down, key tiles of `bk` columns across. A masked tile, which the
    diagonal crosses, has a stroke as well as a colour. Needs 1 <= bq, bk <= n.

    Raises:
        ValueError: a tile that is empty or larger than n.
    """
    if not (1 <= bq <= n and 1 <= bk <= n):
        raise ValueError(f"tiles of {bq} x {bk} do not fit {n} tokens: allowed are 1 to {n}")
    rows, columns = -(-n // bq), -(-n // bk)
    left, top = 64, 34
    size = min(28.0, 232 / max(rows, columns))
    counts = dict.fromkeys(KINDS, 0)
    out = [text(left + columns * size / 2, 14, "keys: a program walks across", anchor="middle"),
           text(14, top + rows * size / 2, "queries: a program each", anchor="middle",
                turned=True)]  # fmt: skip
    for j in _some(columns):
        out.append(text(left + (j + 0.5) * size, top - 6, str(j + 1), anchor="middle"))
    for i in range(rows):
        y = top + i * size
        if i in _some(rows):
            out.append(text(left - 8, y + size / 2 + 4, str(i + 1), anchor="end"))
        for j in range(columns):
            kind, x = tile_kind(i, j, bq, bk), left + j * size
            counts[kind] += 1
            out.append(_tile(kind, x, y, size))
    y = top + rows * size + 22
    total = rows * columns
    legend = {
        "full": f"{counts['full']} whole: no mask needed",
        "mask": f"{counts['mask']} on the diagonal: masked inside",
        "skip": f"{counts['skip']} of {total} never computed",
    }
    for kind, words in legend.items():
        out += [_tile(kind, left, y - 12, 16), text(left + 24, y, words)]
        y += 21
    return Drawing(out, y - 4, counts)


def _some(n: int, most: int = 10) -> range:
    """Indices of at most so many of n rows, for their numbers."""
    return range(0, n, -(-n // most))


def _tile(kind: str, x: float, y: float, size: float) -> str:
    side = size - 2
    line = stroke(f"M{x:g} {y:g}l{side:g} {side:g}") if kind == "mask" else ""
    return box(x, y, side, side, KINDS[kind]) + line

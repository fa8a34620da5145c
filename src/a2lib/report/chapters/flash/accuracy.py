"""How far each implementation is from float64: the figures behind the word "exact"."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.flash.rows import DTYPES, Flash, subject
from a2lib.report.chapters.flash.view import LOOKS
from a2lib.report.metrics import OURS, pick
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

TENSORS = ("o", "dq", "dk", "dv")
ALIKE = 2.0  # errors within this factor are called alike


def table(flash: Flash, dtype: str, caption: str, name: str, head_dim: int = 64) -> Table:
    """Relative Frobenius error against float64 by implementation, tensor and scale of scores."""
    rows = pick(flash.accuracy, dtype=dtype, head_dim=head_dim)
    scales = sorted(rows["score_scale"].dropna().unique())
    lines = []
    for implementation in LOOKS.order(rows["implementation"]):
        here = pick(rows, implementation=implementation)
        cells = [_cell(pick(here, score_scale=scale, tensor=tensor))
                 for scale in scales for tensor in TENSORS]  # fmt: skip
        lines.append([LOOKS.short(implementation), *cells])
    columns = ["", *(f"{_name(tensor)}{_times(scale)}" for scale in scales for tensor in TENSORS)]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def sentence(flash: Flash) -> Markdown:
    """Ours beside the peers, by dtype and scale: the worst of its tensors over all head sizes."""
    if not flash.accuracy["error"].notna().any():
        return Markdown(
            "**Not measured yet** for every implementation: the data hold no errors against "
            "float64. Each result was checked against float64 before it was timed."
        )
    shapes = flash.accuracy[["heads", "seq_len", "head_dim"]].drop_duplicates()
    lines = ["Measured with " + listed(
        [f"{r.heads} heads of {r.head_dim}, {style.tokens(r.seq_len)} tokens"
         for r in shapes.itertuples()]
    ) + ", causal, on the same inputs:", ""]  # fmt: skip
    for dtype in DTYPES:
        for scale in sorted(flash.accuracy["score_scale"].dropna().unique()):
            worst = worst_errors(flash, dtype, scale)
            ours, peers = worst.pop(OURS, None), worst
            if ours is None or not peers:
                continue
            best, least = min(peers, key=peers.get), max(peers, key=peers.get)
            text = (f"- **{dtype}**, {_scale_words(scale)}: the largest of our relative "
                    f"errors is {ours:.1e}; ")  # fmt: skip
            if len(peers) == 1:
                text += f"that of {subject(best)}, the only peer, {peers[best]:.1e}. "
            else:
                text += (f"the peers' lie between {peers[best]:.1e} ({subject(best)}) and "
                         f"{peers[least]:.1e} ({subject(least)}). ")  # fmt: skip
            if ours > ALIKE * peers[least]:
                text += "**Ours is the least accurate.**"
            elif ours > ALIKE * peers[best]:
                better = [subject(n) for n, e in peers.items() if ours > ALIKE * e]
                text += f"More than twice as accurate as ours: {listed(better)}."
            else:
                text += "No peer is more than twice as accurate as ours."
            lines.append(text)
    return Markdown("\n".join(lines))


def worst_errors(flash: Flash, dtype: str, scale: float) -> dict[str, float]:
    """Implementation -> the largest error of its o, dq, dk and dv at one scale, any head size."""
    rows = pick(flash.accuracy, dtype=dtype, score_scale=scale).dropna(subset=["error"])
    worst = rows.groupby("implementation")["error"].max()
    return {name: float(worst[name]) for name in LOOKS.order(worst.index)}


def _scale_words(scale: float) -> str:
    return "scores as they are" if scale == 1 else f"scores {scale:g} times as large"


def _times(scale: float) -> str:
    return "" if scale == 1 else f" ×{scale:g}"


def _name(tensor: str) -> str:
    return f"${tensor if len(tensor) == 1 else 'd' + tensor[1].upper()}$"


def _cell(rows: pd.DataFrame) -> str:
    for row in rows.itertuples():
        if row.status != "ok":
            return style.STATUS.get(row.status, row.status)
        return MISSING if pd.isna(row.error) else f"{row.error:.1e}"
    return MISSING

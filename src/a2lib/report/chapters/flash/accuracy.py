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
    """Ours beside the peers in a sentence: which peers are more accurate, anywhere, and where."""
    if not flash.accuracy["error"].notna().any():
        return Markdown(
            "**Not measured yet** for every implementation: the data hold no errors against "
            "float64. Each result was checked against float64 before it was timed."
        )
    cases = list(_cases(flash))
    if not cases:
        return Markdown("Ours and a peer are not both measured yet.")
    better, least = [], []
    for dtype, scale, ours, peers in cases:
        where = f"in {dtype}, {_scale_words(scale)}"
        names = [subject(name) for name, error in peers.items() if ours > ALIKE * error]
        if ours > ALIKE * max(peers.values()):
            least.append(where)
        elif names:
            better.append(f"{listed(names)} ({where})")
    text = ""
    if least:
        text += f"**Ours is the least accurate** {listed(least)}. "
    if better:
        text += f"More than twice as accurate as ours: {listed(better)}. "
    if not (least or better):
        text = f"In none of the {len(cases)} cases is a peer more than twice as accurate as ours. "
    return Markdown(text + _on_the_second(flash))


def summary(flash: Flash, caption: str, name: str) -> Table:
    """The largest error of ours, and the least and the greatest of the peers', case by case."""
    lines = []
    for dtype, scale, ours, peers in _cases(flash):
        best, worst = min(peers, key=peers.get), max(peers, key=peers.get)
        lines.append([f"{dtype}, {_scale_words(scale)}", f"{ours:.1e}",
                      *(f"{peers[one]:.1e} ({LOOKS.short(one)})"
                        for one in (best, worst))])  # fmt: skip
    columns = ["relative error", "ours", "most accurate peer", "least accurate peer"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def shapes(flash: Flash) -> str:
    """The shapes whose errors were taken, in words."""
    found = flash.accuracy[["heads", "seq_len", "head_dim"]].drop_duplicates()
    words = [f"{r.heads} heads of {r.head_dim}, {style.tokens(r.seq_len)} tokens"
             for r in found.itertuples()]  # fmt: skip
    return "; ".join(words) or "no shape yet"


def worst_errors(flash: Flash, dtype: str, scale: float) -> dict[str, float]:
    """Implementation -> the largest error of its o, dq, dk and dv at one scale, any head size."""
    rows = pick(flash.accuracy, dtype=dtype, score_scale=scale).dropna(subset=["error"])
    worst = rows.groupby("implementation")["error"].max()
    return {name: float(worst[name]) for name in LOOKS.order(worst.index)}


def _cases(flash: Flash):
    """(dtype, scale, our largest error, the peers' by name), where ours and a peer have errors."""
    for dtype in DTYPES:
        for scale in sorted(flash.accuracy["score_scale"].dropna().unique()):
            peers = worst_errors(flash, dtype, scale)
            ours = peers.pop(OURS, None)
            if ours is not None and peers:
                yield dtype, scale, ours, peers


def _on_the_second(flash: Flash) -> str:
    """Whether our errors on the second machine are those of the first."""
    key = ["dtype", "heads", "seq_len", "head_dim", "score_scale", "tensor"]
    first, second = (pick(rows, implementation=OURS).set_index(key)["error"].dropna()
                     for rows in (flash.accuracy, flash.second["flash_accuracy"]))  # fmt: skip
    both = first.index.intersection(second.index)
    if not len(both):
        return ""
    same = int((first.loc[both] == second.loc[both]).sum())
    which = f"All {same} of our" if same == len(both) else f"{same} of our {len(both)}"
    return f"{which} errors are the same figures on the H100."


def _scale_words(scale: float) -> str:
    return "scores as they are" if scale == 1 else f"scores {scale:g} times as large"


def _times(scale: float) -> str:
    return "" if scale == 1 else f" ×{scale:g}"


def _name(tensor: str) -> str:
    # Not a formula, which a screen reader does not take for a column's name.
    return f"*{tensor if len(tensor) == 1 else 'd' + tensor[1].upper()}*"


def _cell(rows: pd.DataFrame) -> str:
    for row in rows.itertuples():
        if row.status != "ok":
            return style.STATUS.get(row.status, row.status)
        return MISSING if pd.isna(row.error) else f"{row.error:.1e}"
    return MISSING

"""What the library set out to reach, as ratios of rows: met, missed, or not measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from a2lib.report.chapters.ddp.rows import MAIN, Ddp, time
from a2lib.report.chapters.ddp.ways import short
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

# What is held against what, and the most that the ratio may be.
ALONE = {"fp32": 1.10, "bf16": 1.05}
LAUNCHED, CAPTURED = 0.70, 0.55
PEER = "PyTorch's DDP, launched"
AFTER, BESIDE = "one GPU, update after backward", "one GPU, update beside backward"


@dataclass(frozen=True)
class Target:
    """``row`` of ours over ``against``: ``ratio``, and with nothing sent ``least``, where both are
    measured. ``together``: in one run."""

    what: str
    limit: float
    against: str
    row: object = None
    ratio: float | None = None
    least: float | None = None
    together: bool = True

    @property
    def met(self) -> bool:
        return self.ratio is not None and self.ratio <= self.limit

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return MISSING
        return ("met" if self.met else "missed") + ("" if self.together else ", two runs")


def ratios(c: Ddp) -> list[Target]:
    """In the order of the table."""
    torch = c.row("torch_ddp", 25)
    after = {sent: c.best(capture=True, sent_dtype=sent) for sent in ALONE}
    beside = {sent: c.best(capture=True, sent_dtype=sent, updating=True) for sent in ALONE}
    return [
        *(_over(f"captured, {sent}", limit, AFTER, after[sent], "ms_without")
          for sent, limit in ALONE.items()),
        *_updating(c, beside),
        _over("launched, fp32", LAUNCHED, PEER, c.best(), torch),
        _over("captured, fp32", CAPTURED, PEER, after["fp32"], torch),
    ]  # fmt: skip


def _updating(c: Ddp, beside: dict[str, object]) -> Iterator[Target]:
    for sent, row in beside.items():
        if row is None:
            continue
        what, limit, alone = f"captured, {sent}, updating", ALONE[sent], c.alone_updating(row)
        ms, together = alone or (None, True)
        least = None if ms is None else ms / float(row.ms_without)
        yield Target(what, limit, AFTER, row, float(row.ms) / float(row.ms_without), least)
        ratio = None if ms is None else float(row.ms) / ms
        yield Target(what, limit, BESIDE, row, ratio, None if ms is None else 1.0, together)


def _over(what: str, limit: float, against: str, row, other) -> Target:
    """``other`` is a row, or the column of ``row`` that it is held against."""
    if row is None or other is None:
        return Target(what, limit, against, row)
    of_row = isinstance(other, str)
    ms = float(getattr(row, other) if of_row else other.ms)
    together = of_row or row.run == other.run
    return Target(what, limit, against, row, row.ms / ms, row.ms_without / ms, together)


def table(c: Ddp, caption: str, label: str) -> Table:
    lines = [
        [t.what, f"{t.limit:.2f}",
         *(MISSING if r is None else f"{r:.3f}" for r in (t.ratio, t.least)), t.verdict,
         t.against, MISSING if t.row is None else short(t.row)]
        for t in ratios(c)
    ]  # fmt: skip
    columns = ["ours", "at most", "ratio", "nothing sent", "", "against", "the fastest"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, keys=1)


def sentence(c: Ddp) -> Markdown:
    """How many are met, and what keeps the others from it."""
    known = [t for t in ratios(c) if t.ratio is not None]
    if not known:
        return Markdown(c.not_yet("whether the targets are met"))
    met = [t for t in known if t.met]
    text = f"Within their limits: {len(met)} of the {len(known)} ratios that are measured."
    text += _like_with_like(known)
    beyond = [f"{t.least:.3f} ({t.what}, at most {t.limit:.2f})"
              for t in known if t.against == PEER and t.least > t.limit]  # fmt: skip
    if beyond:
        text += (
            f" Nothing that updates after backward can meet {len(beyond)} of them: our step that "
            f"sends nothing is {listed(beyond)} of PyTorch's. They were set beside a host on which "
            "PyTorch's step took longer."
        )
    torch, best = c.row("torch_ddp", 25, model=MAIN), c.best()
    if torch is not None and best is not None and not pd.isna(torch.ms_host):
        text += (
            f" Launched, the host takes {time(best.ms_host)} ms to issue our step and "
            f"{time(torch.ms_host)} ms to issue that of PyTorch's wrapper, of {time(best.ms)} "
            f"and {time(torch.ms)} ms: where these are close, it is the host that is timed, and "
            "another host gives another ratio."
        )
    return Markdown(text)


def _like_with_like(known: list[Target]) -> str:
    """What a step that updates beside backward is worth against one GPU that does so too."""
    pairs = {t.what: t for t in known if t.against == BESIDE}
    won = [t for t in known if t.against == AFTER and t.met and t.what in pairs]
    if not won:
        return ""
    told = [f"{t.ratio:.3f} ({t.what})" for t in won]
    same = [pairs[t.what] for t in won]
    found = [f"{t.ratio:.3f}, {'within' if t.met else 'above'} the limit" for t in same]
    return (
        f" With {listed(told)} an update beside the messages is set against one after backward; "
        f"against one GPU that updates beside its backward too it is {listed(found)}."
    )

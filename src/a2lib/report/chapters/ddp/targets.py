"""What the library set out to reach, as ratios of rows: met, missed, or not measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.ddp.rows import MAIN, MODELS, UPDATING, Ddp, name, spread, time
from a2lib.report.chapters.ddp.ways import short
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

# What is held against what, and the most that the ratio may be.
ALONE = {"fp32": 1.10, "bf16": 1.05}
LAUNCHED, CAPTURED = 0.70, 0.55
PEER, OWN, ELSEWHERE = "PyTorch", "PyTorch, each over its own", "PyTorch, next chapter"
AFTER, BESIDE = "one GPU, update after", "one GPU, update beside"


@dataclass(frozen=True)
class Target:
    """``row`` of ours over ``against``: ``ratio``, and with nothing sent ``least``, where both are
    measured; ``spread``, from p20 over p80 to p80 over p20. ``together``: in one run."""

    what: str
    limit: float
    against: str
    row: object = None
    ratio: float | None = None
    least: float | None = None
    together: bool = True
    spread: tuple[float, float] | None = None

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
        *_peer(c, "launched, fp32", LAUNCHED, c.best(), torch),
        *(_over("launched, fp32", LAUNCHED, ELSEWHERE, *pair)
          for pair in [c.best_elsewhere()] if pair is not None),
        *_peer(c, "captured, fp32", CAPTURED, after["fp32"], torch),
        *([] if beside["fp32"] is None
          else _peer(c, "captured, fp32, updating", CAPTURED, beside["fp32"], torch)),
    ]  # fmt: skip


def _updating(c: Ddp, beside: dict[str, object]) -> Iterator[Target]:
    for sent, row in beside.items():
        if row is None:
            continue
        what, limit, alone = f"captured, {sent}, updating", ALONE[sent], c.alone_updating(row)
        ms, together = alone or (None, True)
        least = None if ms is None else ms / float(row.ms_without)
        yield replace(_over(what, limit, AFTER, row, "ms_without"), least=least)
        if ms is None:
            yield Target(what, limit, BESIDE, row)
        else:
            spread = row.ms_p20 / ms, row.ms_p80 / ms
            yield Target(what, limit, BESIDE, row, float(row.ms) / ms, 1.0, together, spread)


def _peer(c: Ddp, what: str, limit: float, row, torch) -> Iterator[Target]:
    """Ours over PyTorch's, and the same where each is held against the same step that sends
    nothing."""
    whole = _over(what, limit, PEER, row, torch)
    if row is None or torch is None:
        yield whole
        return
    alone = c.alone_updating(row) if row.wrapper == UPDATING else (float(row.ms_without), True)
    yield replace(whole, least=None if alone is None else alone[0] / float(torch.ms))
    if alone is not None:
        theirs, (ms, together) = torch.ms / torch.ms_without, alone
        together = together and row.run == torch.run
        yield Target(what, limit, OWN, row, row.ms / ms / theirs, 1 / theirs, together)


def _over(what: str, limit: float, against: str, row, other) -> Target:
    """``other`` is a row, or the column of ``row`` that it is held against."""
    if row is None or other is None:
        return Target(what, limit, against, row)
    own = isinstance(other, str)
    of, column = (row, other) if own else (other, "ms")
    ms, p20, p80 = (float(getattr(of, column + end)) for end in ("", "_p20", "_p80"))
    together, spread = own or row.run == other.run, (row.ms_p20 / p80, row.ms_p80 / p20)
    return Target(what, limit, against, row, row.ms / ms, row.ms_without / ms, together, spread)


def table(c: Ddp, caption: str, label: str) -> Table:
    lines = [
        [t.what, t.against, f"{t.limit:.2f}", _written(t.ratio), t.verdict,
         MISSING if t.spread is None else style.between(t.spread, _written), _written(t.least),
         MISSING if t.row is None else short(t.row)]
        for t in ratios(c)
    ]  # fmt: skip
    columns = ["ours", "against", "at most", "ratio", "", "its spread", "nothing sent",
               "the fastest"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2, keys=2)


def _written(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.3f}"


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
            f" No way to send can meet {len(beyond)} of them here: our step that sends nothing "
            f"is {listed(beyond)} of PyTorch's. They were set beside a host on which PyTorch's "
            "step took longer."
        )
    unsure = [f"{t.ratio:.3f} ({t.what}, against {t.against})" for t in known
              if t.spread is not None and t.spread[0] <= t.limit < t.spread[1]]  # fmt: skip
    if unsure:
        text += f" The limit lies within the spread of {listed(unsure)}."
    return Markdown(text + _launched(c))


def _launched(c: Ddp) -> str:
    """The fastest launched step beside PyTorch's, and whose time that is."""
    torch, best = c.row("torch_ddp", 25, model=MAIN), c.best()
    if torch is None or best is None:
        return ""
    whole, own = _peer(c, "", LAUNCHED, best, torch)
    text = (
        f"\n\nLaunched, ours takes {whole.ratio:.3f} of PyTorch's step "
        f"({style.between(whole.spread, _written)} by their spreads"
        f"{', which overlap' if metrics.level(best, torch) else ''}). The step without "
        f"communication took {time(best.ms_without)} ms beside ours and "
        f"{time(torch.ms_without)} ms beside PyTorch's: each over its own, ours takes "
        f"{own.ratio:.3f}."
    )
    if not pd.isna(torch.ms_host):
        text += (
            f" The host takes {time(best.ms_host)} ms to issue our step and "
            f"{time(torch.ms_host)} ms to issue that of PyTorch's wrapper, of {time(best.ms)} "
            f"and {time(torch.ms)} ms: where these are close, it is the host that is timed, and "
            "another host gives another ratio."
        )
    for model, words in MODELS.items():
        theirs, other = c.row("torch_ddp", 25, model=model), c.best(model)
        if model != MAIN and theirs is not None and other is not None:
            text += (
                f" Of {words}, where it takes {time(other.ms_host)} of {time(other.ms)} and "
                f"{time(theirs.ms_host)} of {time(theirs.ms)} ms, ours takes "
                f"{other.ms / theirs.ms:.3f} of PyTorch's step."
            )
    pair = c.best_elsewhere()
    if pair is not None:
        ours, theirs = pair
        text += (
            f" The chapter on {{ref}}`the sharded optimizer <sharding-time>` has the same step "
            f"of another run{'' if c.one_commit(ours, best) else ' and commit'}: "
            f"{time(ours.ms)} ms ({spread(ours)}; {name(ours)}) where PyTorch's "
            f"takes {time(theirs.ms)} ({spread(theirs)}), {ours.ms / theirs.ms:.3f} of it, with "
            f"{time(ours.ms_without)} and {time(theirs.ms_without)} ms without communication."
        )
    return text


def _like_with_like(known: list[Target]) -> str:
    """What a step that updates beside backward is worth against one GPU that does so too."""
    pairs = {t.what: t for t in known if t.against == BESIDE}
    won = [t for t in known if t.against == AFTER and t.met and t.what in pairs]
    if not won:
        return ""
    told = [f"{t.ratio:.3f} ({t.what})" for t in won]
    same = [pairs[t.what] for t in won]
    found = [f"{t.ratio:.3f} ({'within' if t.met else 'above'} the limit)" for t in same]
    return (
        f" With {listed(told)} an update beside the messages is set against one after backward; "
        f"against one GPU that updates beside its backward too it is {listed(found)}."
    )

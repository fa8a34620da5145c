"""What the library set out to reach, as ratios of rows: met, missed, or not measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.ddp.rows import MAIN, MODELS, UPDATING, Ddp, name, spread, time
from a2lib.report.chapters.ddp.ways import short
from a2lib.report.chapters.measured import HOST
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

# What is held against what, and the most that the ratio may be.
ALONE = {"fp32": 1.10, "bf16": 1.05}
LAUNCHED, CAPTURED = 0.70, 0.55
PEER, OWN, ELSEWHERE = "PyTorch", "PyTorch, each over its own", "PyTorch, next chapter"
ONE, AFTER, BESIDE = "one GPU", "one GPU, both update after", "one GPU, both update beside"


@dataclass(frozen=True)
class Target:
    """``row`` of ours over ``against``: ``ratio``, and with nothing sent ``least``, where both are
    measured; ``spread``, from p20 over p80 to p80 over p20. ``together``: in one run. ``asked``:
    what was aimed at, else a ratio that stands beside it."""

    what: str
    limit: float
    against: str
    row: object = None
    ratio: float | None = None
    least: float | None = None
    together: bool = True
    spread: tuple[float, float] | None = None
    asked: bool = False

    @property
    def met(self) -> bool:
        return self.ratio is not None and self.ratio <= self.limit

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return MISSING
        words = ("met", "missed") if self.asked else ("within", "above")
        return words[not self.met] + ("" if self.together else ", two runs")


def ratios(c: Ddp) -> list[Target]:
    """In the order of the table: each target, and what stands beside it."""
    torch = c.row("torch_ddp", 25)
    found = [one for sent, limit in ALONE.items() for one in _alone(c, sent, limit)]
    found += _peer(c, "launched, fp32", LAUNCHED, c.best(), torch)
    if pair := c.best_elsewhere():
        found.append(_over("launched, fp32", LAUNCHED, ELSEWHERE, *pair))
    ours, after = c.fastest(), c.best(capture=True)
    found += _peer(c, "captured, fp32", CAPTURED, ours, torch)
    if ours is not None and ours.wrapper == UPDATING and after is not None and torch is not None:
        found.append(_over("captured, fp32", CAPTURED, f"{PEER}, both update after", after, torch))
    return found


def _alone(c: Ddp, sent: str, limit: float) -> Iterator[Target]:
    """Ours over the step of one GPU, whose update comes after backward; and where ours does not,
    like with like."""
    row, what = c.fastest(sent_dtype=sent), f"captured, {sent}"
    whole = replace(_over(what, limit, ONE, row, "ms_without"), asked=True)
    if row is None or row.wrapper != UPDATING:
        yield whole
        return
    ms, together = c.alone_updating(row) or (None, True)
    yield replace(whole, least=None if ms is None else ms / float(row.ms_without))
    if ms is None:
        yield Target(what, limit, BESIDE, row)
    else:
        spread = row.ms_p20 / ms, row.ms_p80 / ms
        yield Target(what, limit, BESIDE, row, float(row.ms) / ms, 1.0, together, spread)
    after = c.best(capture=True, sent_dtype=sent)
    if after is not None:
        yield _over(what, limit, AFTER, after, "ms_without")


def _peer(c: Ddp, what: str, limit: float, row, torch) -> Iterator[Target]:
    """Ours over PyTorch's, and the same where each is held against the same step that sends
    nothing."""
    whole = replace(_over(what, limit, PEER, row, torch), asked=True)
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
        [t.what, t.against, f"{t.limit:.2f}", _bold(t, _written(t.ratio)), _bold(t, t.verdict),
         MISSING if t.spread is None else style.between(t.spread, _written), _written(t.least),
         MISSING if t.row is None else short(t.row)]
        for t in ratios(c)
    ]  # fmt: skip
    columns = ["ours", "against", "at most", "ratio", "", "its spread", "nothing sent",
               "the fastest"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2, keys=2)


def _bold(t: Target, text: str) -> str:
    return f"**{text}**" if t.asked and text != MISSING else text


def _written(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.3f}"


def sentence(c: Ddp) -> Markdown:
    """How many are met, and what keeps the others from it."""
    known = [t for t in ratios(c) if t.ratio is not None]
    asked = [t for t in known if t.asked]
    if not asked:
        return Markdown(c.not_yet("whether the targets are met"))
    told = {met: [f"{t.ratio:.3f} ({t.what}, of {_of(t)}; at most {t.limit:.2f})" for t in asked
                  if t.met == met] for met in (True, False)}  # fmt: skip
    text = f"Of the {len(asked)} targets that are measured {len(told[True])} are met"
    text += f": {listed(told[True])}." if told[True] else "."
    text += f" Missed: {listed(told[False])}." if told[False] else ""
    text += _like_with_like(known)
    torch = c.row("torch_ddp", 25, model=MAIN)
    beyond = [f"{t.least:.3f} ({t.what}, at most {t.limit:.2f})" for t in asked
              if t.against == PEER and t.least is not None and t.least > t.limit]  # fmt: skip
    if beyond:
        text += (
            f" No way to send can meet {len(beyond)} of them here: our step that sends nothing "
            f"is {listed(beyond)} of PyTorch's, which exposes {time(torch.ms - torch.ms_without)} "
            f"of its {time(torch.ms)} ms, and no more is there to hide. They were set beside a "
            "host on which PyTorch's step took longer."
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
            f"and {time(torch.ms)} ms: "
        )
        if max(row.ms_host / row.ms for row in (best, torch)) < HOST:
            text += "it is ahead of both, and the step is the GPU's time."
        else:
            text += (
                "where these are close, it is the host that is timed, and another host gives "
                "another ratio."
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


def _of(t: Target) -> str:
    return "PyTorch's, launched" if t.against == PEER else "the captured step of one GPU"


def _like_with_like(known: list[Target]) -> str:
    """What a step that updates beside backward is worth against one GPU that does so too."""
    same = [t for t in known if t.against == BESIDE]
    if not same:
        return ""
    found = [f"{t.ratio:.3f} ({t.what}, {'within' if t.met else 'above'} {t.limit:.2f})"
             for t in same]  # fmt: skip
    return (
        " The one GPU of these updates after backward, while ours updates beside the messages. "
        f"Stricter, over one GPU that updates beside its backward as well, it is {listed(found)}."
    )

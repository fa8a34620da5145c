"""The first screen, and the table of steps."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.fsdp import gathers, memory
from a2lib.report.chapters.fsdp.rows import (
    MAIN,
    MODELS,
    NAMES,
    OURS,
    PEER,
    WORLD_SIZE,
    Fsdp,
    gb,
    sizes,
)
from a2lib.report.chapters.measured import refused, switched, time
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory import fsdp as theory

HANDOUT = "2.7B"  # the edition that asks


def sentence(c: Fsdp) -> Markdown:
    """What a rank holds, whether the weights come in time, and what that costs."""
    s = sizes(HANDOUT)
    state = theory.between(s, WORLD_SIZE)[-1].total
    text = (
        f"**The answer.** Of {MODELS[HANDOUT]} each of {WORLD_SIZE} ranks keeps {gb(state)} GB of "
        f"weights, gradients and moments in place of {gb(16 * s.parameters)} GB."
    )
    told, missing = _measured(c, HANDOUT)
    instead, _ = _measured(c, MAIN)
    if not told and instead:
        told = [f"Measured is {MODELS[MAIN]}.", *instead]
        missing = [f"the same of {MODELS[HANDOUT]}"]
    if missing:
        told.append(c.not_yet(style.listed(missing)))
    return Markdown(" ".join([text, *told]))


def _measured(c: Fsdp, model: str) -> tuple[list[str], list[str]]:
    """(Sentences on what is measured of a model, what is not.)"""
    told, missing = [], []
    peak = [pair for pair in memory.pairs(c, model) if pair.off is not None][-1:]
    if peak and peak[0].name == memory.MOMENTS[-1][-1]:
        most = sum(peak[0].measured.values())
        told.append(f"The most in a step is {gb(most)} GB, {style.signed(peak[0].off, 1)} from the "
                    "formula.")
    else:
        missing.append("the most in a step")
    found = gathers.sentence(c, model)
    if found:
        told.append(f"{found[0].upper()}{found[1:]}.")
        if gathers.held_up(c, model):
            told.append("Launched and from rest, gathers wait for the hosts "
                        "({ref}`below <fsdp-step>`).")  # fmt: skip
    else:
        missing.append("whether each all-gather is done in time")
    row = c.row(OURS, model, capture=True) or c.row(OURS, model)
    if row is not None:
        told.append(f"{'Captured' if row.capture else 'Launched'}, its step takes "
                    f"{row.ms / row.ms_without:.2f} times that of one GPU.")  # fmt: skip
    else:
        missing.append("its step beside one GPU's")
    return told, missing


def times(c: Fsdp) -> Markdown:
    """Each step beside that of one GPU and the peer's."""
    told = []
    for model, words in MODELS.items():
        for capture, way in gathers.WAYS.items():
            row, peer = c.row(OURS, model, capture), c.row(PEER, model, capture)
            if row is None:
                continue
            ratio = row.ms / row.ms_without
            text = (f"For {words}, {way}, our step takes {time(row.ms)} ms and that of one GPU "
                    f"{time(row.ms_without)} ms, a ratio of {ratio:.3f}")  # fmt: skip
            if peer is not None:
                ratio = row.ms / peer.ms
                text += f"; FSDP2's takes {time(peer.ms)} ms, ours {ratio:.3f} times that"
            told.append(f"{text}.")
    return Markdown(" ".join(told) or c.not_yet("the step beside one GPU's and beside FSDP2's"))


def table(c: Fsdp, caption: str, label: str) -> Table:
    """A line for each way to take a step."""
    rows = c.table[(c.table["backend"] == "nccl") & (c.table["world_size"] == WORLD_SIZE)]
    return Table(frame(rows), caption, label, left=2, keys=2)


def frame(rows: pd.DataFrame) -> pd.DataFrame:
    lines = []
    order = rows.assign(_place=rows["wrapper"].map({OURS: 0, PEER: 1})).sort_values(
        ["model", "capture", "_place"], ascending=[False, True, True], kind="stable"
    )
    for row in order.itertuples():
        who = NAMES.get(row.wrapper, row.wrapper)
        way = f"{row.model}, {gathers.WAYS[bool(row.capture)]}"
        if row.status != "ok":
            lines.append([way, who, style.STATUS.get(row.status, row.status), *[MISSING] * 6])
            continue
        by_rank = (row.ms_rank_min, row.ms_rank_median, row.ms_rank_max)
        lines.append([
            way, who, time(row.ms), f"{time(row.ms_p20)} to {time(row.ms_p80)}",
            time(row.ms_without), f"{row.ms / row.ms_without:.3f}", time(row.ms_waited),
            time(row.ms_host), " / ".join(map(time, by_rank)),
        ])  # fmt: skip
    columns = ["step", "", "ms", "p20 to p80", "one GPU", "ratio", "waited", "host",
               "by rank: least / median / most"]  # fmt: skip
    return pd.DataFrame(lines, columns=columns)


def untimed(c: Fsdp) -> Markdown:
    """What has no time or no memory, each with its reason, and what all rows have in common."""
    if not len(c.table):
        return Markdown(c.not_yet("any of these"))
    lines = refused(c.table, lambda row: f"{row.model}, {gathers.WAYS[bool(row.capture)]}, "
                                         f"{NAMES.get(row.wrapper, row.wrapper)}")  # fmt: skip
    lines += refused(c.held, lambda row: f"{row.model}, memory, "
                                         f"{NAMES.get(row.wrapper, row.wrapper)}")  # fmt: skip
    if with_ := switched(c.table):
        lines.append(f"\n{with_}")
    return Markdown("\n".join(lines) or "Every step that was tried has its time.")

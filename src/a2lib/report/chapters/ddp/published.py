"""What other writeups of the assignment measured, beside ours: shares and ratios, since their steps
are others."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd

from a2lib.report.chapters.ddp.rows import MAIN, Ddp, gradient_bytes, time
from a2lib.report.chapters.ddp.ways import short
from a2lib.report.metrics import pick
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

NAIVE, FLAT, OVERLAPPED, BUCKETED = "naive", "flat", "overlapped", "bucketed"
LIKE = 0.01  # two ways whose steps differ by less may be one


def table(c: Ddp, caption: str, label: str) -> Table:
    """Each printed step, what of it was communication, and its ratio to the step that sends each
    gradient by itself after backward; and that of ours."""
    lines = []
    for row in c.reference.itertuples():
        first = _naive(c, row)
        way = SimpleNamespace(wrapper=row.wrapper, bucket_mb=row.bucket_mb, carrier="",
                              sent_dtype="fp32")  # fmt: skip
        ours = [_ratio(c, row, capture) for capture in (False, True)]
        lines.append([
            row.device, short(way), time(row.ms_mean, 4), f"{row.ms_mean / first.ms_mean:.3f}",
            *ours, time(row.ms_communication),
            MISSING if pd.isna(row.share) else f"{row.share:g}%",
        ])  # fmt: skip
    columns = ["GPUs", "gradients", "step, ms", "over naive", "ours, launched", "ours, captured",
               "communication, ms", "share"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=2, keys=2)


def sentence(c: Ddp) -> Markdown:
    """What their figures say of their links, and where ours say something else."""
    told = []
    for device, rows in c.reference.groupby("device", sort=False):
        naive, flat, during = (_first(rows, wrapper) for wrapper in (NAIVE, FLAT, OVERLAPPED))
        rate = gradient_bytes(MAIN) / naive.ms_communication / 1e6
        text = (
            f"On {device}, at {int(naive.context)} tokens, the all-reduces of {NAIVE} take "
            f"{time(naive.ms_communication)} of {time(naive.ms_mean)} ms, {rate:.0f} GB/s."
        )
        if during is not None:
            alone = naive.ms_mean - naive.ms_communication
            left, wait = during.ms_mean - alone, during.ms_mean * during.share / 100
            text += (
                f" Sent during backward they are given as {during.share:g}%, which is what is "
                f"waited for behind backward. But by these figures the step would take "
                f"{time(alone)} ms without them, and it takes {time(during.ms_mean)}: "
                f"{time(left)} ms are exposed as this page has the word, of which that wait is "
                f"{time(wait)}. By the rest backward is longer."
            )
        buckets = [row for row in rows.itertuples() if row.wrapper == BUCKETED]
        if buckets:
            best = min(buckets, key=lambda row: row.ms_mean)
            over = [f"{row.ms_mean / best.ms_mean - 1:.1%} with {int(row.bucket_mb)}"
                    for row in buckets if row is not best]  # fmt: skip
            text += (
                f" The best bucket there is of {int(best.bucket_mb)} MB; the step is longer by "
                f"{listed(over)} MB."
            )
        elif abs(flat.ms_mean / naive.ms_mean - 1) < LIKE:
            text += (
                f" The step of {FLAT} is within {abs(flat.ms_mean / naive.ms_mean - 1):.1%} of it; "
                f"the command printed there asks for {NAIVE}, so it may be one way twice."
            )
        told.append(text)
    ours = c.row(NAIVE)
    if ours is not None:
        rate = gradient_bytes(MAIN) / ours.ms_communication / 1e6
        told.append(
            f"Ours, between two {c.short}, take {time(ours.ms_communication)} ms, {rate:.0f} GB/s."
        )
    return Markdown(" ".join(told))


def _first(rows: pd.DataFrame, wrapper: str):
    return next(pick(rows, wrapper=wrapper).itertuples(), None)


def _naive(c: Ddp, row):
    """The step that the writeup compares with: of the same section, else of the same GPUs."""
    same = pick(c.reference, device=row.device)
    return _first(pick(same, source=row.source), NAIVE) or _first(same, NAIVE)


def _ratio(c: Ddp, row, capture: bool) -> str:
    ours = c.row(row.wrapper, int(row.bucket_mb), capture=capture)
    first = c.row(NAIVE, capture=capture)
    return MISSING if ours is None or first is None else f"{ours.ms / first.ms:.3f}"

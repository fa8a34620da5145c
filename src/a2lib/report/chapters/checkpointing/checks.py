"""Prediction and measurement: how far they are apart, and what the times come from."""

from __future__ import annotations

from a2lib.report import style
from a2lib.report.chapters.checkpointing.rows import (
    BATCH,
    CONTEXT,
    MODEL,
    SEGMENTS,
    TITLES,
    WIDE,
    Checkpointing,
    again,
    gb,
    ms_again,
    ms_predicted,
    predicted,
    words,
)
from a2lib.report.chapters.measured import time
from a2lib.report.metrics import pick
from a2lib.report.tables import Markdown

# Relative errors of a prediction: what counts as met, and what is named.
NEAR, FAR = 0.01, 0.03


def repeated(c: Checkpointing) -> Markdown:
    """Why a longer segment takes little longer, and what a selection repeats, with times."""
    found = [c.timed(s, "fresh") for s in ("block", SEGMENTS[-1], "selective:linear")]
    again_ms = [ms_again(c, s, "fresh", WIDE) for s in ("block", SEGMENTS[-1], "selective:linear")]
    if None in found or None in again_ms:
        return Markdown(c.not_yet("what a longer segment and a selection cost"))
    one, longest, linear = found
    more = longest.ms / one.ms - 1
    forward = float(one.ms_forward)
    return Markdown(
        f"In {TITLES[WIDE]}, segments of {words(SEGMENTS[-1])} take {more:.1%} longer than "
        f"{words('block')}: all that they repeat beside it is one product a block, "
        f"{time(again_ms[1] - again_ms[0])} of {time(longest.ms)} ms by the prediction. What the "
        "linear layers' results leave to be repeated is "
        f"{again('selective:linear'):.2f} forwards by operations, but "
        f"{again_ms[2] / forward:.2f} by time, since it moves bytes; that step is "
        f"{abs(1 - linear.ms / one.ms):.1%} {'shorter' if linear.ms < one.ms else 'longer'} than "
        f"{words('block')}'s and its peak "
        f"{linear.peak_bytes / one.peak_bytes:.1f} times as high."
    )


def kept_times(c: Checkpointing) -> Markdown:
    """How much longer a step takes where gradients are added to what is there."""
    shares = []
    for row in pick(c.table, status="ok", gradients="kept").itertuples():
        other = c.timed(row.strategy, "fresh", _way(row), int(row.layers))
        if other is not None and c.one_commit(row, other):
            shares.append(row.ms / other.ms - 1)
    if not shares:
        return Markdown(c.not_yet("the same with kept gradients"))
    return Markdown("With kept gradients, which are added to and then zeroed, a step takes "
                    f"{style.between(shares, '{:.1%}'.format)} longer.")  # fmt: skip


def checked(c: Checkpointing) -> Markdown:
    """How far measured peaks are from the predicted ones, and times; each that is far off."""
    rows = pick(c.table, status="ok", model=MODEL, context=CONTEXT, batch=BATCH)
    rows = rows.dropna(subset=["peak_bytes"])
    if not len(rows):
        return Markdown(c.not_yet("the peaks beside the prediction"))
    off, late, far, slow = [], [], [], []
    for row in rows.itertuples():
        where = row.strategy, row.gradients, _way(row), int(row.layers)
        title = f"{words(row.strategy)} ({', '.join(where[2])}, {row.gradients})"
        of = predicted(*where).peak
        off.append((abs(row.peak_bytes - of) / of, abs(row.peak_bytes - of)))
        if off[-1][0] > FAR:
            far.append(f"{title} {_signed(row.peak_bytes / of - 1)}")
        expected = ms_predicted(c, *where)
        if expected is None or row.strategy == "block":
            continue
        late.append(row.ms / expected - 1)
        if abs(late[-1]) > FAR:
            base = c.timed("block", *where[1:])
            own = row.ms_forward / base.ms_forward - 1
            slow.append(f"{title} {_signed(late[-1])} ({_signed(own)})")
    share, most = max(off)
    text = (f"Of {len(off)} measured peaks the farthest from its prediction is {share:.2%} off "
            f"({style.size(most)}).")  # fmt: skip
    if far:
        text += f" Peaks off by more than {FAR:.0%}: {'; '.join(far)}."
    if late:
        near = sum(abs(share) <= NEAR for share in late)
        text += (f" The time of a step is {style.between(late, _signed)} off the predicted one, "
                 f"within {NEAR:.0%} in {near} of {len(late)}.")  # fmt: skip
    if slow:
        text += (
            f" Times off by more than {FAR:.0%}, in brackets how far the same step's first "
            f"forward, which repeats nothing, is off that of {words('block')}: {'; '.join(slow)}. "
            "Where the two are alike it is the GPU that was slower or faster, not the strategy."
        )
    return Markdown(text)


def _signed(share: float) -> str:
    return style.signed(share, 1)


def _way(row) -> tuple[str, str]:
    return row.precision, row.attention


def fragments(c: Checkpointing) -> Markdown:
    """How much more the allocator held than tensors took at the peak."""
    rows = pick(c.table, status="ok").dropna(subset=["reserved_bytes", "peak_bytes"])
    if not len(rows):
        return Markdown(c.not_yet("what the allocator holds beyond the tensors"))
    over = (rows["reserved_bytes"] - rows["held_bytes"] - rows["peak_bytes"]).astype(float)
    share = over / (rows["held_bytes"] + rows["peak_bytes"]).astype(float)
    return Markdown(
        f"PyTorch's allocator held {style.between(share, '{:.1%}'.format)} more than the tensors "
        f"took at the peak ({gb(over.max())} GB at most), cuBLAS's workspaces among it."
    )


def precise(c: Checkpointing) -> Markdown:
    """What TF32 does to the time: the same strategies with products in fp32."""
    told, times, more = [], [], []
    for strategy in ("half", "block", "segments:2"):
        rows = [c.timed(strategy, "fresh", way) for way in (("fp32", "eager"), WIDE)]
        if all(row is not None for row in rows):
            more.append(int(rows[0].peak_bytes) - int(rows[1].peak_bytes))
            times.append(rows[0].ms / rows[1].ms)
            told.append(f"{style.digits(rows[0].ms)} ms in place of {style.digits(rows[1].ms)} "
                        f"({words(strategy)})")  # fmt: skip
    if not told:
        return Markdown(c.not_yet("steps of the first setting without TF32"))
    most = max(map(abs, more))
    peak = f"The peaks differ by {style.size(most)} at most" if most else "The peaks are the same"
    return Markdown(
        f"Without TF32 a step takes {style.between(times, '{:.2f}'.format)} times as long: "
        f"{style.listed(told)}. {peak}."
    )

"""What the host takes of a launched step: for each message, and for the step without any."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.ddp.rows import MAIN, MB, MODELS, Ddp, seen, time
from a2lib.report.chapters.ddp.ways import short
from a2lib.report.chapters.measured import HOST
from a2lib.report.tables import Markdown
from a2lib.theory.buckets import fill, gradients
from a2lib.theory.transformer import SIZES

ALONE = ("naive", "overlapped")  # a message for each gradient
SPREAD = 0.05  # steps without communication that differ by more are said to


def messages(row) -> int:
    """All-reduces of a step of one of our ways."""
    sizes = [4.0 * one.elements for one in gradients(SIZES[row.model])]
    if row.wrapper in ALONE:
        return len(sizes)
    return 1 if row.wrapper == "flat" else len(list(fill(sizes, row.bucket_mb * MB)))


def sentence(c: Ddp, model: str = MAIN) -> Markdown:
    """Why a launched step with many messages is slow: what each costs the host."""
    sent = c.of(model, False, carrier="backend", sent_dtype="fp32").dropna(subset=["ms", "ms_host"])
    during = [row for row in sent.itertuples() if row.wrapper in ("overlapped", "bucketed")]
    if len(during) < 2:
        return Markdown(c.not_yet("what a message costs the host"))
    few = min(during, key=messages)
    alike = [row for row in during if row.run == few.run]  # another run may have had another host
    many = max(alike, key=lambda row: (messages(row), row.ms_host))
    each = [(row.ms_host - few.ms_host) / (messages(row) - messages(few)) for row in alike
            if messages(row) > messages(few)]  # fmt: skip
    if not each:
        return Markdown(c.not_yet("what a message costs the host"))
    text = (
        f"Launched, the host takes {time(many.ms_host)} ms to issue the step of {MODELS[model]} "
        f"with {messages(many)} messages during backward and {time(few.ms_host)} ms with "
        f"{messages(few)}"
    )
    after = c.row("naive", model=model)
    after = after if after is not None and after.run == few.run else None
    low, high = c.apart(False, model, few.run) or (0.0, 0.0)
    if many.ms_host - few.ms_host <= high - low:
        if after is not None:
            text += f"; {messages(after)} sent after backward take it {time(after.ms_host)} ms"
        text += (
            f". All that is less than the {time(high - low)} ms by which the step without "
            "communication differs from way to way, so what a message costs the host is not seen"
        )
    else:
        text += f", so that a message costs it {style.between(each, time)} ms"
        if after is not None:
            text += _cost_after(after, few, min(each))
    text += "."
    late = [row for row in during if row.ms_host >= HOST * row.ms]
    if late:
        many_of = "all of these" if len(late) == len(during) else f"{len(late)} of {len(during)}"
        text += f" In {many_of} ways the host takes at least {HOST:.0%} of the step to issue it"
        above = [row.ms - other.ms for row in late if (other := c.replayed(row)) is not None]
        if above:
            text += (
                f". Replayed, with no host in it, the step takes {style.between(above, time)} ms "
                "less, and no more than that is the host's."
            )
        else:
            text += (
                ": there the host is timed, not the link, and the GPU waits between a block's "
                "kernels for its messages to be issued."
            )
    return Markdown(text + "".join(_ahead(c, one) for one in MODELS if one != model))


def _ahead(c: Ddp, model: str) -> str:
    """Where the host is well ahead of every step of another model."""
    rows = c.of(model, False).dropna(subset=["ms", "ms_host"])
    shares = list(rows["ms_host"] / rows["ms"])
    if not shares or max(shares) >= HOST:
        return ""
    found = style.between(shares, lambda share: f"{share:.0%}")
    return (
        f" Of {MODELS[model]} it takes {found} of a step, PyTorch's included: fewer and larger "
        "blocks, whose launched steps are the GPU's time."
    )


def _cost_after(after, few, least: float) -> str:
    """What a message costs that is sent after backward, beside the least of those in it."""
    cost = (after.ms_host - few.ms_host) / (messages(after) - messages(few))
    if cost <= 0:
        return "; sent after backward, nothing that is seen"
    text = f"; sent after backward, {time(cost)} ms"
    if cost < least:
        text += (
            ". What it costs more in backward (a hook on autograd's thread, a stream of its own, a "
            "work object to wait for) is not measured apart"
        )
    return text


def baseline(c: Ddp) -> Markdown:
    """How far apart the steps without communication are, which are all the same work; of several
    runs each by itself, and how far its steps are above their replays."""
    told = [(way, *found) for capture, way in ((False, "launched"), (True, "captured"))
            if (found := c.apart(capture)) is not None]  # fmt: skip
    if not told:
        return Markdown(c.not_yet("how far the steps without communication are apart"))
    text = "The step without communication is the same work beside every way. For " + (
        f"{MODELS[MAIN]} it took "
        + " and ".join(f"{style.between(found, time)} ms {way}" for way, *found in told)
        + "."
    )
    way, low, high = told[0]
    if way == "launched" and high / low - 1 > SPREAD:
        rows = c.of(MAIN, False).dropna(subset=["ms", "ms_without"])
        text += " What differs when launched is the host, from moment to moment"
        runs = sorted(rows["run"].unique())
        if len(runs) > 1:
            each = "\n".join(f"- {_of_run(c, rows[rows['run'] == run])}" for run in runs)
            text += f", and the rows are of {len(runs)} runs:\n\n{each}\n\n"
        else:
            text += f": {_nothing(low, high)}. "
        text += "The steps themselves are the safer comparison"
        count = sum(not seen(row) for row in rows.itertuples())
        if count:
            text += (
                f". In {count} of {len(rows)} ways the step and the same without communication "
                "are *level*: their spreads from p20 to p80 overlap, and what such a row exposes "
                "or hides is not known"
            )
        text += "."
    return Markdown(text)


def _of_run(c: Ddp, rows: pd.DataFrame) -> str:
    """Which rows these are, what the host of their run took, and how far they can be compared."""
    low, high = float(rows["ms_without"].min()), float(rows["ms_without"].max())
    found = list(rows.itertuples())
    text = f"{'; '.join(f'*{short(row)}*' for row in found)}: it took "
    text += f"{style.between((low, high), time)} ms"
    above = [row.ms - other.ms for row in found if (other := c.replayed(row)) is not None]
    if above:
        text += f", and steps are {style.between(above, time)} ms above their replays"
    return f"{text}; {_nothing(low, high)}" if high > low else text


def _nothing(low: float, high: float) -> str:
    return f"a difference of less than {time(high - low)} ms between two exposed times says nothing"

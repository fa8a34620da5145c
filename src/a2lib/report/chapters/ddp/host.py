"""What the host takes of a launched step: for each message, and for the step without any."""

from __future__ import annotations

from a2lib.report import style
from a2lib.report.chapters.ddp.rows import MAIN, MB, MODELS, Ddp, seen, time
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
    few, many = min(during, key=messages), max(during, key=lambda row: (messages(row), row.ms_host))
    each = [(row.ms_host - few.ms_host) / (messages(row) - messages(few)) for row in during
            if messages(row) > messages(few)]  # fmt: skip
    if not each:
        return Markdown(c.not_yet("what a message costs the host"))
    text = (
        f"Launched, the host takes {time(many.ms_host)} ms to issue the step of {MODELS[model]} "
        f"with {messages(many)} messages during backward and {time(few.ms_host)} ms with "
        f"{messages(few)}"
    )
    after = c.row("naive", model=model)
    low, high = c.apart(False, model) or (0.0, 0.0)
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
        text += (
            f" In {many_of} ways the host takes at least {HOST:.0%} of "
            "the step to issue it: there the host is timed, not the link, and the GPU waits "
            "between a block's kernels for its messages to be issued."
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
    """How far apart the steps without communication are, which are all the same work."""
    told = [(way, *found) for capture, way in ((False, "launched"), (True, "captured"))
            if (found := c.apart(capture)) is not None]  # fmt: skip
    if not told:
        return Markdown(c.not_yet("how far the steps without communication are apart"))
    text = "The step without communication is the same work beside every way. For " + (
        f"{MODELS[MAIN]} it took "
        + " and ".join(f"{style.between(found, time)} ms {way}" for way, *found in told)
    )
    way, low, high = told[0]
    if way == "launched" and high / low - 1 > SPREAD:
        text += (
            ". What differs when launched is the host, from moment to moment: a difference of less "
            f"than {time(high - low)} ms between two exposed times says nothing, and the steps "
            "themselves are the safer comparison"
        )
        rows = c.of(MAIN, False).dropna(subset=["ms", "ms_without"])
        count = sum(not seen(row) for row in rows.itertuples())
        if count:
            text += (
                f". In {count} of {len(rows)} ways the step and the same without communication "
                "are *level*: their spreads from p20 to p80 overlap, and what such a row exposes "
                "or hides is not known"
            )
    return Markdown(text + ".")

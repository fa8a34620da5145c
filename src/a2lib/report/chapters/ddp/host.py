"""What the host takes of a launched step: for each message, and for the step without any."""

from __future__ import annotations

from a2lib.report import style
from a2lib.report.chapters.ddp.rows import MAIN, MB, MODELS, Ddp, time
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
        f"Launched, the host takes {time(many.ms_host)} ms to issue the step of {messages(many)} "
        f"messages during backward and {time(few.ms_host)} ms for that of {messages(few)}, so "
        f"that a message costs it {style.between(each, time)} ms"
    )
    after = c.row("naive", model=model)
    if after is not None:
        cost = (after.ms_host - few.ms_host) / (messages(after) - messages(few))
        text += f"; sent after backward, {time(cost)} ms"
        if cost < min(each):
            text += (
                ". What it costs more in backward (a hook on autograd's thread, a stream of its "
                "own, a work object to wait for) is not measured apart"
            )
    text += "."
    late = [row for row in during if row.ms_host >= HOST * row.ms]
    if late:
        many_of = "all of these" if len(late) == len(during) else f"{len(late)} of {len(during)}"
        text += (
            f" In {many_of} ways the host takes at least {HOST:.0%} of "
            "the step to issue it: there the host is timed, not the link, and the GPU waits "
            "between a block's kernels for its messages to be issued."
        )
    return Markdown(text)


def baseline(c: Ddp) -> Markdown:
    """How far apart the steps without communication are, which are all the same work."""
    told = []
    for capture, way in ((False, "launched"), (True, "captured")):
        rows = c.of(MAIN, capture).dropna(subset=["ms_without"])
        if len(rows) > 1:
            found = [float(ms) for ms in rows["ms_without"]]
            told.append((max(found) / min(found) - 1, way, found))
    if not told:
        return Markdown(c.not_yet("how far the steps without communication are apart"))
    text = "The step without communication is the same work beside every way. For " + (
        f"{MODELS[MAIN]} it took "
        + " and ".join(f"{style.between(found, time)} ms {way}" for _, way, found in told)
    )
    off, way, found = told[0]
    if off > SPREAD:
        text += (
            f". What differs when {way} is the host, from moment to moment: "
            f"a difference of less than {time(max(found) - min(found))} "
            "ms between two exposed times says nothing, and the steps themselves are the safer "
            "comparison"
        )
    return Markdown(text + ".")

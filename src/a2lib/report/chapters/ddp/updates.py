"""The update of each bucket beside the messages of the others: what it gains, and what one GPU that
sends nothing gains by the same."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.ddp.host import SPREAD
from a2lib.report.chapters.ddp.rows import BUCKET_MB, MODELS, UPDATING, Ddp, time
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.transformer import SIZES, parameter_count

WAYS = {
    ("backend", "fp32"): "NCCL in fp32", ("copy_engines", "fp32"): "copy engines in fp32",
    ("copy_engines", "bf16"): "copy engines in bf16",
}  # fmt: skip
# Bytes a parameter: of a weight, gradient or mean, and of AdamW's two moments. What is timed in
# turns has two optimizers and so many graphs, each with gradients of its own.
WIDE, MOMENTS, GRAPHS = 4, 8, 3
ONE = WIDE + MOMENTS + WIDE + WIDE
TURNS = WIDE + 2 * MOMENTS + WIDE + GRAPHS * WIDE


def pairs(c: Ddp) -> Iterator[tuple[str, object, object, tuple[float, bool] | None]]:
    """Captured: (who sends, the row that updates after backward, the one that does beside the
    messages, one GPU that sends nothing and does beside its backward)."""
    for (carrier, sent), words in WAYS.items():
        where = {"capture": True, "carrier": carrier, "sent_dtype": sent}
        after, beside = c.row("bucketed", BUCKET_MB, **where), c.row(UPDATING, BUCKET_MB, **where)
        if after is not None and beside is not None:
            yield words, after, beside, c.alone_updating(beside)


def table(c: Ddp, caption: str, label: str) -> Table:
    """A line for each who sends: both steps, what is gained, and both over one GPU's, whose update
    comes after backward, and the second over one's that updates beside it."""
    lines = []
    for words, after, beside, alone in pairs(c):
        known = [MISSING] * 2
        if alone is not None:
            known = [time(beside.ms_without - alone[0]), f"{beside.ms / alone[0]:.3f}"]
        over = [f"{row.ms / row.ms_without:.3f}" for row in (after, beside)]
        lines.append([words, time(after.ms), time(beside.ms), time(after.ms - beside.ms), known[0],
                      *over, known[1]])  # fmt: skip
    columns = ["sent by", "update after, ms", "beside, ms", "gained", "one GPU gains",
               "after / one GPU after", "beside / one GPU after",
               "beside / one GPU beside"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, keys=1)


def too_large(c: Ddp) -> list[str]:
    """What the measuring of such a step holds, for those whose memory did not suffice."""
    told = []
    for model, words in MODELS.items():
        rows = metrics.pick(c.of(model, True), wrapper=UPDATING, carrier="copy_engines",
                            sent_dtype="fp32", status="oom")  # fmt: skip
        if not len(rows):
            continue
        count = parameter_count(SIZES[model])
        told.append(
            f"\nThat step of {words} was to be timed in turns with two others, which takes, in "
            f"bytes a parameter: weights {WIDE}, the moments of two optimizers {2 * MOMENTS}, the "
            f"means in shared memory {WIDE}, and gradients in each of {GRAPHS} graphs (the step, "
            "the step that sends nothing, and that of one GPU that updates beside its backward) "
            f"{GRAPHS * WIDE}: {TURNS * count / 1e9:.0f} of the {c.capacity() / 1e9:.0f} GB that "
            "the driver gives, before activations and 16-bit casts of the weights, which each "
            "graph has for itself. A training has one optimizer and one graph, "
            f"{ONE * count / 1e9:.0f} GB before these. What the last bytes were asked for is not "
            "stored."
        )
    return told


def sentence(c: Ddp) -> Markdown:
    """How much of the gain is hidden communication."""
    found = list(pairs(c))
    if not found:
        return Markdown(c.not_yet("updates beside the messages"))
    told = [f"{time(after.ms - beside.ms)} ms ({words})" for words, after, beside, _ in found]
    text = f"Beside the messages the update spares {listed(told)}."
    known = [pair for pair in found if pair[3] is not None]
    if not known:
        return Markdown(f"{text} {c.not_yet('what it spares one GPU that sends nothing')}")
    own = style.between([b.ms_without - alone for _, _, b, (alone, _) in known], time)
    how = "by the shares of {ref}`benchmark-updates`"
    if all(measured for *_, (_, measured) in known):
        how = "measured in turns with these"
    text += f" One GPU that sends nothing is spared {own} ms by the same, {how}."
    kinds: dict[str, list[str]] = {"more": [], "level": [], "less": []}
    for words, after, beside, (alone, _) in known:
        more = after.ms - beside.ms - (beside.ms_without - alone)
        spread = max(
            after.ms_p80 - after.ms_p20, beside.ms_p80 - beside.ms_p20,
            beside.ms_without_p80 - beside.ms_without_p20,
        )  # fmt: skip
        kind = "level" if abs(more) <= spread else "more" if more > 0 else "less"
        kinds[kind].append(f"{words} ({time(abs(more))} ms {'more' if more > 0 else 'less'})")
    if kinds["more"]:
        text += f" The rest is communication that it hides: {listed(kinds['more'])}."
    if kinds["level"]:
        text += (
            f" Within the spread of a step or of one without communication are "
            f"{listed(kinds['level'])}: that the update hides communication there is not seen."
        )
    if kinds["less"]:
        text += f" Below that are {listed(kinds['less'])}."
    return Markdown(text + _launched(c))


def _launched(c: Ddp) -> str:
    """The same step launched, where its replay says that the host is what it waits for."""
    launched, replayed = (c.row(UPDATING, BUCKET_MB, capture=capture, carrier="copy_engines")
                          for capture in (False, True))  # fmt: skip
    if None in (launched, replayed) or launched.ms <= (1 + SPREAD) * replayed.ms:
        return ""
    text = (
        " An update beside the messages is for captured steps: launched, that by copy engines "
        f"takes {time(launched.ms)} ms where its replay takes {time(replayed.ms)}, since it takes "
        f"the host {time(launched.ms_host)} ms to issue"
    )
    after = c.row("bucketed", BUCKET_MB, carrier="copy_engines")
    if after is not None:
        text += f", with the update after backward {time(after.ms_host)}"
    return f"{text}."

"""What published answers count, and which of it files kernels by when they ran."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.measured import time
from a2lib.report.chapters.profile.answer import top
from a2lib.report.chapters.profile.rows import Profile, title
from a2lib.report.chapters.profile.softmax import compared
from a2lib.report.metrics import pick, row_of
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.transformer import SIZES

RANGES, TIMED, COUNTED = "A100 40 GB", "H800 PCIe", "unnamed GPU of 80 GB"
BLAMED = "xl25"  # the model of the writeup with a table for each range
PRINTED_AT = 256  # tokens of that
TIMED_AT = 128  # of the one that compares with a timer
LINEAR = 7  # layers of a block, each one product of the forward


def linear(model: str) -> int:
    """Products of a forward outside of attention: seven a block, and the head."""
    return LINEAR * SIZES[model].num_layers + 1


def printed(p: Profile, **where) -> float | None:
    row = row_of(p.reference, **where)
    return None if row is None else float(row.printed)


def ranges(p: Profile) -> Markdown:
    """How many of the forward's linear layers one writeup's tables file under backward."""
    forward = pick(p.reference, device=RANGES, quantity="calls", phase="forward")
    names = list(forward["kernel"])
    counted = {
        phase: sum(printed(p, device=RANGES, quantity="calls", phase=phase, kernel=name) or 0
                   for name in names)
        for phase in ("forward", "backward", "forward-backward")
    }  # fmt: skip
    want = linear(BLAMED)
    if counted["forward-backward"] != want:
        return Markdown("")
    return Markdown(
        f"The writeup of the {RANGES} has a table of kernels for each range. The two kernels of "
        f"its forward are called {counted['forward']:.0f} times in the range of the forward and "
        f"{counted['backward']:.0f} times in that of the backward, together "
        f"{counted['forward-backward']:.0f}: exactly the {want} linear layers of a forward of that "
        f"model ({LINEAR} a block and the head). So {counted['backward'] / want:.0%} of the "
        "forward's linear layers are filed under the backward. They ran there: the range is the "
        "host's, and the GPU was behind. Filed by their launches they are the forward's, and the "
        "table's shares of the forward and the backward change with them."
    )


def cut_short(p: Profile) -> Markdown:
    """The published forward that is shorter than the timer's, and its count."""
    rows = []
    for row in pick(p.reference, device=TIMED, quantity="timer").itertuples():
        where = {"device": TIMED, "model": row.model}
        traced = printed(p, **where, quantity="nsight")
        n = printed(p, **where, quantity="calls")
        rows.append((row.model, traced / row.printed, n, linear(row.model)))
    short = [one for one in rows if one[1] < 1]
    told = [
        f"for the {title(model)} model the trace's forward is {ratio:.1%} of the timer's, and the "
        f"top kernel, {n:.0f} calls, {n / want:.1%} of the model's {want} linear layers"
        for model, ratio, n, want in short
    ]
    whole = [
        f"{ours[1]} calls of its top kernel, {ours[2]:.0%} of the kernel time"
        for model, *_ in short if (ours := _ours(p, model, TIMED_AT)) is not None
    ]
    here = f" Ours of the same model has {listed(whole)}." if whole else ""
    uneven = [f"{title(model)} {n:.0f}" for model, _, n, _ in rows
              if n % SIZES[model].num_layers > 1]  # fmt: skip
    return Markdown(
        f"On the {TIMED}, {'; '.join(told)}: what is left out is what ran after the host's range "
        "had ended. A forward cannot be shorter than its kernels; the writeup suspects the "
        f"kernels.{here} In its smaller models the trace's is the longer one, where the host is "
        "the limit and a profiler adds to each launch. A kernel of a forward is called so many "
        f"times a block, and once more if the head has it; counts of {', '.join(uneven)} are "
        "neither, so that there too the range has cut some off."
    )


def shares(p: Profile, caption: str, name: str) -> Table:
    """What was printed of the products' share and of the softmax, beside ours."""
    lines = []
    model = next(reversed(p.models), None)  # the nearest in size
    ours = {} if model is None else {
        phase: p.share(model, PRINTED_AT, phase) for phase in ("forward", "train-step")
    }  # fmt: skip
    for phase, words in (("forward", "inference"), ("train-step", "whole step")):
        theirs = printed(p, device=RANGES, quantity="matmul", phase=phase)
        mine = ours.get(phase)
        lines.append([f"products, {words}", f"{theirs:.0f} %",
                      MISSING if mine is None else f"{mine:.1%}"])  # fmt: skip
    columns = ["share of kernel time", RANGES, f"{p.short}, {title(model) if model else 'any'}"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1)


def softmax(p: Profile) -> Markdown:
    """The published times of the softmax, as ratios to the products."""
    found = {q: printed(p, device=COUNTED, quantity=q) for q in ("scores", "softmax", "values")}
    both = found["scores"] + found["values"]
    whole = printed(p, device=RANGES, quantity="attention")
    part = printed(p, device=RANGES, quantity="softmax")
    ours = [f"{r.times:.2f} in {title(model)}" for model in p.models
            if (r := compared(p, model, PRINTED_AT)) is not None]  # fmt: skip
    here = f", where kernels alone give {listed(ours)} at {PRINTED_AT} tokens" if ours else ""
    return Markdown(
        f"Of the softmax, the writeup of the {COUNTED} prints {found['softmax']:.0f} µs beside "
        f"{found['scores']:.0f} and {found['values']:.0f} µs of the ranges around it, "
        f"{found['softmax'] / both:.2f} times both{here}; that of the {RANGES} {part:.0f} of "
        f"{whole:,.0f} µs of an attention module. These are lengths of ranges on the host's "
        "timeline, in which scaling and masking count as scores. The first one gives the products "
        "64 times the operations, d_model over heads; counted, it is 4 d / 5."
    )


def sources(p: Profile) -> Markdown:
    """Where the published figures stand."""
    found = p.reference.drop_duplicates(["device"])
    told = "; ".join(f"{row.device}: {row.source}" for row in found.itertuples())
    return Markdown(f"Published: {told}. None has an address that could be given here.")


def _ours(p: Profile, model: str, context: int) -> tuple[str, int, float] | None:
    """The top kernel of our forward, its calls and share."""
    kernels = p.named(model, context, "forward")
    return top(kernels) if len(kernels) else None


def table(p: Profile, caption: str, name: str) -> Table:
    """The published forward, by timer and trace, and the top kernel's calls, beside ours."""
    lines = []
    for row in pick(p.reference, device=TIMED, quantity="timer").itertuples():
        where = {"device": TIMED, "model": row.model}
        n, traced = (printed(p, **where, quantity=q) for q in ("calls", "nsight"))
        layers = SIZES[row.model].num_layers
        lines.append([title(row.model), style.tokens(row.context), f"{row.printed:g}",
                      f"{traced:g}", f"{n:.0f}", f"{n / layers:.2f}",
                      f"{printed(p, **where, quantity='share'):g} %",
                      *_cells(p, row.model, int(row.context))])  # fmt: skip
    columns = ["model", "tokens", "timer, ms", "trace, ms", "calls", "a block", "share",
               f"{p.short}: timer, ms", "trace, ms ", "calls ", "a block ", "share "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)


def _cells(p: Profile, model: str, context: int) -> list[str]:
    """Of ours the same columns, as far as they are measured."""
    row, ours = p.forward(model, context), _ours(p, model, context)
    times = [MISSING] * 2 if row is None else [time(row.ms_timer), time(row.ms)]
    if ours is None:
        return [*times, *[MISSING] * 3]
    _, n, of_all = ours
    return [*times, f"{n}", f"{n / SIZES[model].num_layers:.2f}", f"{of_all:.1%}"]

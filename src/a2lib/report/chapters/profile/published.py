"""What published answers count, and which of it files kernels by when they ran."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.profile.rows import Profile, title
from a2lib.report.metrics import pick, row_of
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.transformer import SIZES

RANGES, TIMED, COUNTED = "A100 40 GB", "H800 PCIe", "unnamed GPU of 80 GB"
BLAMED = "xl25"  # the model of the writeup with a table for each range
PRINTED_AT = 256  # tokens of that
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
    uneven = [f"{title(model)} {n:.0f}" for model, _, n, _ in rows
              if n % SIZES[model].num_layers]  # fmt: skip
    return Markdown(
        f"On the {TIMED}, {'; '.join(told)}: what is left out is what ran after the host's range "
        "had ended. A forward cannot be shorter than its kernels; the writeup suspects the "
        "kernels. In its smaller models the trace's is the longer one, where the host is the "
        "limit and a profiler adds to each launch. A kernel of a forward is called so many times "
        f"a block; its counts of {', '.join(uneven)} are no multiples of the blocks, so that there "
        "too the range has cut some off."
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
    return Markdown(
        f"Of the softmax, the writeup of the {COUNTED} prints {found['softmax']:.0f} µs beside "
        f"{found['scores']:.0f} and {found['values']:.0f} µs of the ranges around it, "
        f"{found['softmax'] / both:.2f} times both; that of the {RANGES} {part:.0f} of "
        f"{whole:,.0f} µs of an attention module. These are lengths of ranges on the host's "
        "timeline, in which scaling and masking count as scores. The first one gives the products "
        "64 times the operations, d_model over heads; counted, it is 4 d / 5."
    )


def sources(p: Profile) -> Markdown:
    """Where the published figures stand."""
    found = p.reference.drop_duplicates(["device"])
    told = "; ".join(f"{row.device}: {row.source}" for row in found.itertuples())
    return Markdown(f"Published: {told}. None has an address that could be given here.")


def table(p: Profile, caption: str, name: str) -> Table:
    """The published forward, by timer and trace, and the top kernel's calls."""
    lines = []
    for row in pick(p.reference, device=TIMED, quantity="timer").itertuples():
        where = {"device": TIMED, "model": row.model}
        n, traced = (printed(p, **where, quantity=q) for q in ("calls", "nsight"))
        layers = SIZES[row.model].num_layers
        lines.append([title(row.model), style.tokens(row.context), f"{row.printed:g}",
                      f"{traced:g}", f"{n:.0f}", f"{n / layers:.2f}",
                      f"{printed(p, **where, quantity='share'):g} %"])  # fmt: skip
    columns = ["model", "tokens", "timer, ms", "trace, ms", "calls", "a block", "share"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=2)

"""Figures of other writeups: their gains, and what their own memory and spread say of them."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.benchmark.rows import MODELS
from a2lib.report.chapters.compile.models import ratio
from a2lib.report.chapters.compile.rows import (
    BYTES,
    CONTEXT,
    GRID_BATCH,
    HEAD_DIMS,
    LENGTHS,
    PASSES,
    Compile,
    pairs,
    title,
)
from a2lib.report.metrics import row_of, time_of
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.compiling import held

UNNAMED, H800, SMALL = "unnamed GPU of 80 GB", "H800 PCIe", "small GPU, unnamed"
MIB = 2**20
SHOWN = (256, 4096, 16384)  # the host's length, and two of the GPU's
STEPS = 10  # that a published mean and deviation are of


def sources(c: Compile) -> Markdown:
    """Where the published figures stand, and what they do not say."""
    parts: dict[str, list[str]] = {}
    for row in c.reference.drop_duplicates(["device", "source"]).itertuples():
        where, _, part = row.source.rpartition(" ")
        parts.setdefault(f"{row.device}: {where}", []).append(part)
    told = "; ".join(f"{where} {listed(found)}" for where, found in parts.items())
    return Markdown(
        f"Published: {told}. None says whether its products were in TF32. The H800's eager times "
        "are those of its other tables, the models' at 512 tokens, so that eager and compiled did "
        "not take turns. The small GPU's models come without context and precision."
    )


def gain(c: Compile, device: str, **where) -> float | None:
    """Eager over compiled of a published pair; None where one is missing."""
    both = [time_of(c.reference, device=device, implementation=i, **where)
            for i in ("eager", "compile")]  # fmt: skip
    return None if None in both else both[0] / both[1]


def attention(c: Compile, caption: str, name: str) -> Table:
    """The published gains of attention by shape and pass, beside ours of the same grid."""
    ours, lines = pairs(c.grid), []
    for d in HEAD_DIMS:
        for n in SHOWN:
            cells = []
            for pass_ in PASSES:
                where = {"head_dim": d, "seq_len": n}
                r = row_of(ours, written="plain", dtype="fp32", batch=GRID_BATCH, pass_=pass_,
                           **where)  # fmt: skip
                theirs = [gain(c, device, phase=pass_, **where) for device in (UNNAMED, H800)]
                cells += [MISSING if g is None else f"{g:.2f}" for g in theirs]
                cells.append(MISSING if r is None else f"{r.gain:.2f}")
            lines.append([d, style.tokens(n), *cells])
    columns = ["d", "tokens", "forward: 80 GB, unnamed", "H800 PCIe", c.short,
               "backward: 80 GB, unnamed", "H800 PCIe ", f"{c.short} "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0, keys=2)


def matrices(c: Compile, device: str, implementation: str, n: int = LENGTHS[-1], d: int = 16):
    """(saved for the backward, allocated by it at its peak) in N x N matrices of fp32, as the
    published memory has them; None for what is not given."""
    row = row_of(c.reference, device=device, implementation=implementation, seq_len=n, head_dim=d,
                 phase="backward")  # fmt: skip
    if row is None or pd.isna(row.before_mib):
        return None
    matrix = GRID_BATCH * n * n * BYTES["fp32"] / MIB
    return row.before_mib / matrix, (row.peak_mib - row.before_mib) / matrix


def memory(c: Compile) -> Markdown:
    """What the published memory says of what was compiled, and how it fits the closed form."""
    unnamed = {i: matrices(c, UNNAMED, i) for i in ("eager", "compile")}
    other = matrices(c, H800, "eager")
    n = LENGTHS[-1]
    gains = {d: gain(c, d, seq_len=n, head_dim=16, phase="forward") for d in (UNNAMED, H800)}
    return Markdown(
        "The published memory explains why the first two disagree. At "
        f"{style.tokens(n)} tokens and heads of 16 the unnamed GPU's eager attention saves "
        f"{unnamed['eager'][0]:.2f} matrices of scores for the backward, which allocates "
        f"{unnamed['eager'][1]:.2f} more; compiled it allocates "
        f"{unnamed['compile'][1]:.2f}. The closed form says "
        f"{held('eager', 'plain', 'backward')} and {held('compile', 'plain', 'backward')}: this is "
        f"attention with `torch.softmax`. The H800's eager attention saves {other[0]:.2f}, as a "
        "softmax written out does, whose exponentials and quotients are both kept. It has more "
        f"kernels to fuse, and gains {gains[H800]:.2f} forward where the other gains "
        f"{gains[UNNAMED]:.2f}. The latter is less than one kernel fewer makes; a guess is that "
        "there the scale multiplies q in place of the scores, which leaves nothing to fuse forward."
    )


def outlier(c: Compile, context: int = 128) -> Markdown:
    """The published train-step that compiling made slower: its deviation against its mean."""

    def ms(implementation, mode, column="ms", length=context):
        row = row_of(c.reference, part="model", device=UNNAMED, implementation=implementation,
                     mode=mode, context=length)  # fmt: skip
        return float(getattr(row, column))

    mean, std = (ms("compile", "train-step", column) for column in ("ms", "ms_std"))
    # One sample x above n - 1 equal ones: mean + x / n, deviation x / sqrt(n).
    excess = std * math.sqrt(STEPS)
    without_optimizer = ms("compile", "forward-backward")
    rest = [ms("eager", "train-step", length=n) - ms("eager", "forward-backward", length=n)
            for n in (128, 256, 512)]  # fmt: skip
    return Markdown(
        f"The unnamed GPU's train-step of 2.7B at {context} tokens is slower compiled "
        f"({style.digits(mean, 4)} ± {style.digits(std)} ms) than eager "
        f"({style.digits(ms('eager', 'train-step'), 4)} ms), though its forward and backward are "
        f"faster ({style.digits(without_optimizer)} against "
        f"{style.digits(ms('eager', 'forward-backward'))} ms). One step among {STEPS} that takes "
        f"{style.digits(excess)} ms more gives just this deviation; without it the mean is "
        f"{style.digits(mean - excess / STEPS, 4)} ms. What its eager steps take beyond forward "
        f"and backward is {style.digits(min(rest))} to {style.digits(max(rest))} ms, with which "
        f"the compiled step would take {style.digits(without_optimizer + min(rest))} to "
        f"{style.digits(without_optimizer + max(rest))} ms. So a step that still compiled or "
        "allocated is likely among the measured ones, and the remedy is more warm-up."
    )


def contradiction(c: Compile) -> Markdown:
    """The published forward that compiling made slower, within a train-step that it made faster."""

    def ms(implementation, mode):
        return time_of(c.reference, device=SMALL, implementation=implementation, model="small",
                       mode=mode)  # fmt: skip

    rest = [ms(i, "train-step") - ms(i, "forward") for i in ("eager", "compile")]
    ours = [g for p in ("fp32", "bf16") for w in ("blocks", "model")
            if (g := ratio(c, "small", w, "forward", CONTEXT, p))]  # fmt: skip
    here = (
        f" Here the small model's forward is {style.between(ours, '{:.2f}'.format)} times as fast "
        "compiled." if ours else ""
    )  # fmt: skip
    return Markdown(
        "The small GPU's writeup has the small model's forward slower compiled "
        f"({style.digits(ms('compile', 'forward'))} against {style.digits(ms('eager', 'forward'))} "
        "ms), for a fixed overhead of compiled code, and its train-step faster, for a backward "
        "bound by memory. That does not add up: the train-step has this forward in it, and leaves "
        f"{style.digits(rest[1])} ms for backward and optimizer, where eager takes "
        f"{style.digits(rest[0])}. A guess: what was timed as forward had compilation in it, or "
        f"waited for the host.{here}"
    )


def averaged(c: Compile) -> Markdown:
    """The mean gain over a whole grid, as published, taken apart by length."""

    def mean(pass_, lengths):
        found = [gain(c, UNNAMED, seq_len=n, head_dim=d, phase=pass_) for n in lengths
                 for d in HEAD_DIMS]  # fmt: skip
        return sum(found) / len(found)

    short, long = LENGTHS[:2], LENGTHS[2:]
    return Markdown(
        f"The unnamed GPU's writeup averages its forward gain over all shapes to "
        f"{mean('forward', LENGTHS):.2f}, as if forward were slower compiled. It is "
        f"{mean('forward', short):.2f} on average up to {style.tokens(short[-1])} tokens and "
        f"{mean('forward', long):.2f} beyond: two regimes, the host's and the GPU's, whose mean "
        "belongs to neither."
    )


def models(c: Compile, caption: str, name: str) -> Table:
    """The published gains of whole models, beside ours."""
    lines = []
    for model in MODELS:
        h800 = [gain(c, H800, model=model, phase=p) for p in PASSES]
        small = [gain(c, SMALL, model=model, mode=m) for m in ("forward", "train-step")]
        unnamed = [gain(c, UNNAMED, model=model, mode=m, context=CONTEXT)
                   for m in ("forward", "forward-backward", "train-step")]  # fmt: skip
        ours = []
        for phase in (*PASSES, "wall"):
            eager, compiled = c.model(model, "none", phase), c.best(model, phase)
            known = eager is not None and compiled is not None
            cell = f"{float(eager.ms) / float(compiled.ms):.2f}" if known else MISSING
            ours.append(f"*{cell}*" if known and compiled.compile == "blocks" else cell)
        cells = [MISSING if g is None else f"{g:.2f}" for g in (*h800, *unnamed, *small)]
        if set(cells) | set(ours) != {MISSING}:
            lines.append([title(model), *ours, *cells])
    columns = ["model", f"{c.short}: forward", "backward", "train-step", "H800: forward",
               "backward ", "80 GB, unnamed: forward", "forward and backward", "train-step ",
               "small GPU: forward", "train-step  "]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1)

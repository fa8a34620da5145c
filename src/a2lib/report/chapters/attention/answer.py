"""The first screen, and the grid: times, their spread, memory."""

from __future__ import annotations

import numpy as np
import pandas as pd

from a2lib.report import figures, panels, style
from a2lib.report.chapters.attention.rows import (
    BATCH,
    HEAD_DIMS,
    LENGTHS,
    LONGEST,
    MASKS,
    MIDDLE,
    PASSES,
    Plain,
    gb,
    shape,
)
from a2lib.report.chapters.measured import HALF, mean, shared, time
from a2lib.report.metrics import pick, row_of
from a2lib.report.style import Chart, listed
from a2lib.report.tables import Markdown, Table
from a2lib.theory.eager import longest, tiled_total

LONGER = 1.02  # a replay that takes so many times its call is named


def sentence(p: Plain) -> Markdown:
    """What is held and why, what the largest shape takes, and where the GPU ends."""
    s, capacity = shape(), p.capacity()
    ends = {how: longest(BATCH, MIDDLE, False, capacity, "backward", how=how)
            for how in ("tensors", "blocks")}  # fmt: skip
    text = (
        f"**The answer.** Its scores are {BATCH} matrices of N x N numbers: at "
        f"{style.tokens(LONGEST)} tokens {gb(s.matrix)} GB in fp32. Forward holds two of that "
        "size at a time and leaves one for the backward; that adds three, so that "
        f"{gb(s.total('backward'))} GB are taken at the peak, of which all that is not a matrix "
        f"makes {gb(s.total('backward') - 4 * s.matrix)} GB. Twice the tokens take four times "
        f"that. Nothing of the grid is too large for the {capacity / 1e9:.0f} GB{_whose(p)} of an "
        f"{p.short}; four matrices would fill them at {style.tokens(ends['tensors'])} tokens, and "
        "since PyTorch's allocator finds no place for the last of them without a fifth, the end "
        f"is predicted at {style.tokens(ends['blocks'])}."
    )
    removed = (
        "What removes it is to keep no matrix: attention in tiles takes "
        f"{gb(tiled_total(BATCH, LONGEST, MIDDLE, 'backward'))} GB at {style.tokens(LONGEST)} "
        "tokens."
    )
    end = row_of(p.limits, pass_="backward", head_dim=MIDDLE, causal=False, allocator="blocks",
                 status="ok")  # fmt: skip
    if end is not None:
        text += (f" Tried in steps of {end.fails_len - end.fits_len} tokens, "
                 f"{style.tokens(end.fits_len)} ran and {style.tokens(end.fails_len)} did not. "
                 f"{removed}")  # fmt: skip
    else:
        text += f" {removed} {p.not_yet('where it ends')}"
    forward, backward = (p.row(pass_) for pass_ in PASSES)
    if not all(row is not None and row.status == "ok" for row in (forward, backward)):
        return Markdown(f"{text} {p.not_yet('the times of this grid')}")
    return Markdown(
        f"{text} At {style.tokens(LONGEST)} tokens, with vectors of {MIDDLE}, forward takes "
        f"{time(forward.ms_mean)} ms and backward {time(backward.ms_mean)} ms."
    )


def _whose(p: Plain) -> str:
    """What the capacity is, where that is not what the maker states."""
    if not len(p.limits):
        return ""
    return f" that the driver calls free ({p.sheet('memory'):.0f} GB by its maker's count)"


def table(p: Plain, causal: bool, caption: str, name: str) -> Table:
    """Mean and deviation of the calls, the GPU's and the host's share, and memory, as the handout
    asks."""
    lines = []
    for seq_len in sorted({*LENGTHS, *pick(p.table, implementation="eager")["seq_len"]}):
        for head_dim in HEAD_DIMS:
            found = [p.row(pass_, seq_len, head_dim, causal) for pass_ in PASSES]
            if not any(row is not None for row in found):
                continue
            cells = []
            for row in found:
                known = row is not None
                cells += [mean(row), time(row.ms_graph if known else None),
                          time(row.ms_host if known else None)]  # fmt: skip
            memory = [gb(found[1].held_bytes), gb(found[1].peak_bytes)] if found[1] else ["·", "·"]
            lines.append([style.tokens(seq_len), head_dim, *cells, *memory])
    columns = ["tokens", "d", "forward", "GPU", "host", "backward", "GPU ", "host ",
               "before backward, GB", "it adds, GB"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0, keys=2)


def scaling(p: Plain) -> Markdown:
    """What doubling the tokens and what the vector's size costs, where both are measured."""
    told = []
    for pass_ in PASSES:
        double = [p.row(pass_, n) for n in (LONGEST // 2, LONGEST)]
        wide = [p.row(pass_, head_dim=d) for d in (HEAD_DIMS[0], HEAD_DIMS[-1])]
        if all(row is not None and row.status == "ok" for row in (*double, *wide)):
            told.append(
                f"{pass_} takes {double[1].ms_mean / double[0].ms_mean:.2f} times as long at "
                f"{style.tokens(LONGEST)} tokens as at half of them, and "
                f"{wide[1].ms_mean / wide[0].ms_mean:.2f} times as long with vectors of "
                f"{HEAD_DIMS[-1]} as with {HEAD_DIMS[0]}, for {HEAD_DIMS[-1] // HEAD_DIMS[0]} "
                "times the products"
            )
    if not told:
        return Markdown(p.not_yet("how the times grow"))
    text = "; ".join(told)
    return Markdown(f"{text[0].upper()}{text[1:]}.")


def hosts(p: Plain) -> Markdown:
    """Which times are the host's, not the GPU's, and where the GPU's own is the longer one."""
    rows = pick(p.table, implementation="eager", status="ok").dropna(subset=["ms_host", "ms_graph"])
    if not len(rows):
        return Markdown(p.not_yet("host time and GPU time apart"))
    bound = rows[rows["ms_host"] > rows["ms_graph"]]
    told = []
    for seq_len in sorted(bound["seq_len"].unique()):
        mine, of = (int((r["seq_len"] == seq_len).sum()) for r in (bound, rows))
        told.append(f"{mine} of {of} rows at {style.tokens(seq_len)} tokens")
    where = f"in {listed(told)}: these times are the host's" if told else "nowhere"
    text = f"The host takes longer to issue a call than the GPU to run it {where}."
    slower = rows[rows["ms_graph"] > LONGER * rows["ms"]]
    if len(slower):
        most = (slower["ms_graph"] / slower["ms"]).max() - 1
        text += (
            f" In {len(slower)} rows, from {style.tokens(slower['seq_len'].min())} tokens on, the "
            f"replay takes longer than the call, by up to {most:.0%}. We have no explanation. The "
            "two are timed differently: a call is waited for before the next, a replay follows the "
            "last one and a flush of the L2 cache."
        )
    return Markdown(text)


def beyond(p: Plain) -> Markdown:
    """Whether longer sequences than the grid's run and run out of memory as predicted, and why some
    have no time of the GPU alone."""
    rows = pick(p.table, implementation="eager").rename(columns={"pass": "pass_"})
    rows = list(rows[rows["seq_len"] > LONGEST].itertuples())
    if not rows:
        return Markdown("")
    ends = {
        (d, causal, pass_):
            longest(BATCH, int(d), bool(causal), p.capacity(), pass_, how="blocks")
        for d, causal, pass_ in {(r.head_dim, r.causal, r.pass_) for r in rows}
    }  # fmt: skip
    right = [(r.status == "ok") == (r.seq_len <= ends[r.head_dim, r.causal, r.pass_]) for r in rows
             if r.status in ("ok", "oom")]  # fmt: skip
    text = (
        f"Beyond {style.tokens(LONGEST)} tokens {sum(right)} of {len(right)} passes end as "
        "[predicted](#attention-limit): they run up to the length whose blocks fill the memory, "
        "and past it they are out of memory."
    )
    why = [r.note.partition("no graph: ")[2] for r in rows if r.status == "ok"]
    if known := list(dict.fromkeys(filter(None, why))):
        text += (f" {sum(map(bool, why))} of those that run have no time of a replay "
                 f"({'; '.join(known)}).")  # fmt: skip
    if half := int(shared(p.table).sum()):
        text += f" {half} of the {len(p.table)} rows that this page times are of {HALF}."
    return Markdown(text)


def spread(p: Plain) -> Chart:
    """Standard deviation over the mean of the handout's grid, by length and size of a vector, a map
    per pass and mask."""
    rows = pick(p.table, implementation="eager", status="ok")
    rows = rows[rows["seq_len"].isin(LENGTHS)]
    if not len(rows):
        return panels.empty()
    lengths, maps = sorted(rows["seq_len"].unique()), {}
    for causal in MASKS:
        for pass_ in PASSES:
            shares = pd.DataFrame(np.nan, index=lengths, columns=list(HEAD_DIMS))
            for row in pick(rows, pass_=pass_, causal=causal).itertuples():
                share = 0.0 if pd.isna(row.ms_std) else float(row.ms_std / row.ms_mean)
                shares.loc[row.seq_len, row.head_dim] = share
            maps[f"{pass_}, {MASKS[causal]}"] = shares.rename(index=style.tokens, columns=str)
    return figures.spreads(maps, down="tokens", across="d")


def beside(p: Plain) -> Markdown:
    """What tiles take in place of eager's at the longest length of the grid that has both."""
    for seq_len in reversed(LENGTHS):
        eager, ours = (
            [p.row(pass_, seq_len, MIDDLE, True, name) for pass_ in PASSES]
            for name in ("eager", "a2lib")
        )
        if all(row is not None and row.status == "ok" for row in (*eager, *ours)):
            told = [f"{pass_} {time(mine.ms_mean)} ms in place of {time(theirs.ms_mean)}"
                    for pass_, mine, theirs in zip(PASSES, ours, eager, strict=True)]  # fmt: skip
            sizes = [gb(rows[1].held_bytes + rows[1].peak_bytes) for rows in (ours, eager)]
            return Markdown(
                f"At {style.tokens(seq_len)} tokens with a mask and vectors of {MIDDLE} it takes "
                f"{listed(told)}, and {sizes[0]} GB in place of {sizes[1]}."
                f"{_runs(*eager, *ours)}"
            )
    return Markdown(p.not_yet("ours in this protocol; its memory is counted"))


def others(p: Plain) -> pd.DataFrame:
    """The rows of what is not eager."""
    return p.table[p.table["implementation"] != "eager"]


def by_hand(p: Plain) -> Markdown:
    """What the softmax written out as a formula holds and takes, beside `torch.softmax`."""
    told, apart = [], ""
    for causal, words in MASKS.items():
        for seq_len in reversed(LENGTHS):
            mine, theirs = (p.row("backward", seq_len, MIDDLE, causal, name)
                            for name in ("by_hand", "eager"))  # fmt: skip
            if any(row is None or row.status != "ok" for row in (mine, theirs)):
                continue
            more = float(mine.held_bytes - theirs.held_bytes) / shape(seq_len, MIDDLE).matrix
            told.append(
                f"{words} at {style.tokens(seq_len)} tokens {more:.2f} matrices more, and its "
                f"backward takes {time(mine.ms_mean)} ms in place of {time(theirs.ms_mean)}"
            )
            apart = apart or _runs(mine, theirs)
            break
    if not told:
        return Markdown(p.not_yet("the softmax written out as a formula"))
    return Markdown(f"Measured here, the softmax written out holds before the backward: "
                    f"{'; '.join(told)}.{apart}")  # fmt: skip


def _runs(*rows) -> str:
    """A sentence where rows that are compared are of more than one run."""
    several = len({row.run for row in rows}) > 1
    return " The two were not measured in one run." if several else ""


def removed(p: Plain, caption: str, name: str) -> Table:
    """Causal attention in tiles beside eager: times, and the most memory with a backward."""
    lines = []
    for seq_len in sorted({*LENGTHS, *pick(p.table, implementation="a2lib")["seq_len"]}):
        cells, known = [], False
        for implementation in ("eager", "a2lib"):
            found = [p.row(pass_, seq_len, MIDDLE, True, implementation) for pass_ in PASSES]
            known |= any(row is not None for row in found)
            total = None
            if found[1] is not None and found[1].status == "ok":
                total = found[1].held_bytes + found[1].peak_bytes
            cells += [*(mean(row) for row in found), gb(total)]
        counted = [shape(seq_len, MIDDLE, True).total("backward"),
                   tiled_total(BATCH, int(seq_len), MIDDLE, "backward")]  # fmt: skip
        if known or seq_len in LENGTHS:
            lines.append([style.tokens(seq_len), *cells, *(gb(size) for size in counted)])
    columns = ["tokens", "eager: forward", "backward", "GB", "ours: forward", "backward ", "GB ",
               "eager, counted: GB", "ours, counted: GB"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0)

"""What a pass must cost: the floor of its kernels, beside what was measured."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.attention.rows import (
    BATCH,
    HEAD_DIMS,
    LENGTHS,
    LONGEST,
    MASKS,
    MIDDLE,
    PASSES,
    Plain,
    shape,
    shape_of,
)
from a2lib.report.chapters.measured import time
from a2lib.report.metrics import pick
from a2lib.report.tables import Markdown, Table
from a2lib.theory.attention import eager_launches
from a2lib.theory.eager import Eager
from a2lib.theory.roofline import Floor, floor

SHORT = 512  # tokens up to which a call is the host's


def floors(p: Plain, s: Eager, pass_: str) -> dict[str, Floor]:
    """The floor of the products, of the rest and of the total; {} without ceilings."""
    if p.bandwidth is None or "fp32" not in p.tflops:
        return {}
    return floor(s.kernels(pass_), p.tflops["fp32"] * 1e12, p.bandwidth * 1e12)


def table(p: Plain, caption: str, name: str) -> Table:
    """Operations, bytes, launches and floor by length and size, beside the GPU's time."""
    lines = []
    for seq_len in LENGTHS:
        for head_dim in (HEAD_DIMS[0], MIDDLE, HEAD_DIMS[-1]):
            for pass_ in PASSES:
                found = floors(p, shape(seq_len, head_dim), pass_)
                if not found:
                    continue
                total, row = found["total"], p.row(pass_, seq_len, head_dim)
                known = row is not None and row.status == "ok"
                gpu = _gpu(row) if known else None
                lines.append([
                    style.tokens(seq_len), head_dim, pass_, total.launches,
                    style.digits(total.flops / 1e9), style.digits(total.bytes / 1e9),
                    time(found["products"].ms), time(found["elementwise"].ms), time(total.ms),
                    time(gpu), "·" if gpu is None else f"{total.ms / gpu:.0%}",
                ])  # fmt: skip
    columns = ["tokens", "d", "pass", "kernels", "GFLOP", "GB moved", "products, ms",
               "the rest, ms", "floor, ms", "measured", "share"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=0, keys=3)


def sentence(p: Plain) -> Markdown:
    """Which limit binds at the longest length, by the size of a vector."""
    told = []
    for head_dim in (HEAD_DIMS[0], HEAD_DIMS[-1]):
        found = [floors(p, shape(head_dim=head_dim), pass_) for pass_ in PASSES]
        if not all(found):
            return Markdown(p.not_yet("the ceilings that an estimate needs"))
        shares = [f["products"].ms / f["total"].ms for f in found]
        told.append(
            f"with vectors of {head_dim} products are {shares[0]:.0%} of the forward's floor and "
            f"{shares[1]:.0%} of the backward's"
        )
    moved = [sum(k.read + k.written for k in shape(causal=c).kernels("forward")) / shape().matrix
             for c in MASKS]  # fmt: skip
    return Markdown(
        f"At {style.tokens(LONGEST)} tokens {', and '.join(told)}, at "
        f"{style.digits(p.tflops['fp32'])} TFLOP/s and {style.digits(p.bandwidth)} TB/s; what "
        f"remains is reading and writing matrices: {moved[0]:.1f} of them in a forward without a "
        f"mask, {moved[1]:.1f} with one, since the mask is made, applied to a copy, and kept."
    )


def beside(p: Plain) -> Markdown:
    """The floor over the GPU's time: in this grid, and in the flash chapter's sweep."""
    told = []
    for where, rows in (
        ("of this grid", pick(p.table, implementation="eager", status="ok")),
        ("of one head in the sweep of [FlashAttention-2](flash.md)",
         pick(p.flash, status="ok", dtype="fp32", batch=1, heads=1, causal=True)),
    ):  # fmt: skip
        rows = rows[(rows["seq_len"] >= LONGEST) & rows["pass"].isin(PASSES)]
        rows = rows.rename(columns={"pass": "pass_"})
        shares = []
        for row in rows.itertuples():
            found = floors(p, shape_of(row), row.pass_)
            if found:
                shares.append(found["total"].ms / _gpu(row))
        if shares:
            wrong = ", so that somewhere floor or time is wrong" * (max(shares) > 1)
            told.append(
                f"In the {len(shares)} rows {where} from {style.tokens(LONGEST)} tokens on, the "
                f"floor is {style.between(shares, '{:.0%}'.format)} of the GPU's time{wrong}."
            )
    if not len(pick(p.table, implementation="eager", status="ok")):
        told.append(p.not_yet("the GPU's time of this grid beside its floor"))
    return Markdown(" ".join(told))


def launches(p: Plain) -> Markdown:
    """What the host needs for the launches of a pass, from eager's short rows in the flash sweep,
    and up to which length that is longer than the floor."""
    rows = pick(p.flash, status="ok", dtype="fp32", causal=True)
    rows = rows[(rows["seq_len"] <= SHORT) & rows["ms_host"].notna()]
    told = []
    for pass_ in PASSES:
        mine = pick(rows, pass_=pass_)["ms_host"]
        if not len(mine) or not floors(p, shape(), pass_):
            return Markdown(p.not_yet("what a launch costs the host"))
        each = float(mine.median()) / eager_launches(pass_)
        host = each * len(shape().kernels(pass_))
        longer = [n for n in LENGTHS if floors(p, shape(n), pass_)["total"].ms < host]
        told.append(
            f"{pass_} {1e3 * each:.0f} µs for each of its launches, so that the "
            f"{len(shape().kernels(pass_))} of full attention take {time(host)} ms, more than the "
            + (f"floor up to {style.tokens(longer[-1])} tokens" if longer else "floor nowhere")
        )
    runs = [set(pick(rows, pass_=pass_)["run"]) for pass_ in PASSES]
    apart = "" if runs[0] & runs[1] else ", the two passes of different runs"
    return Markdown(
        f"With vectors of {MIDDLE} the host takes {', and '.join(told)} (median of eager's rows up "
        f"to {SHORT} tokens in the sweep of [FlashAttention-2](flash.md){apart}). So far a GPU at "
        "its floor would wait for the host; [the grid](#attention-grid) has whose time it was."
    )


def gap(p: Plain) -> Markdown:
    """What the GPU's time has beyond the floor, as passes over a matrix, by the vector's size."""
    grid = pick(p.table, implementation="eager", status="ok", causal=True)
    rows = grid if len(grid) else pick(p.flash, status="ok", dtype="fp32", batch=1, causal=True)
    rows = pick(rows, seq_len=LONGEST)
    told, even = [], True
    for pass_ in PASSES:
        passes = {}
        for row in pick(rows, pass_=pass_).rename(columns={"pass": "pass_"}).itertuples():
            s = shape_of(row)
            if found := floors(p, s, pass_):
                beyond = _gpu(row) - found["total"].ms
                passes[int(row.head_dim)] = beyond * p.bandwidth * 1e9 / s.matrix
        if len(passes) < 2:
            return Markdown(p.not_yet("what fills the gap between floor and time"))
        low, high = min(passes.values()), max(passes.values())
        told.append(f"{pass_} {low:.1f} to {high:.1f}")
        even &= passes[max(passes)] <= 2 * passes[min(passes)]
    text = (
        f"At {style.tokens(LONGEST)} tokens with a mask, the GPU's time beyond the floor is worth "
        f"so many more passes over a matrix, by the vector's size: {', '.join(told)}"
        + (" (one head, in that sweep)." if not len(grid) else ".")
    )
    if even:
        text += (
            " It does not grow as the products do, so what is missing is in the kernels between "
            "them. Our guess, not tested: the softmax reads a row that is too long for the chip "
            "three times, and what applies a mask is slower than a plain copy."
        )
    return Markdown(text)


def eight_heads(p: Plain) -> Markdown:
    """Until the grid is measured: what one head's time would make for a batch of eight."""
    if p.row("forward", causal=True) is not None:
        return Markdown("")
    rows = pick(p.flash, status="ok", dtype="fp32", batch=1, heads=1, causal=True, seq_len=LONGEST,
                head_dim=MIDDLE)  # fmt: skip
    times = {r.pass_: float(r.ms) for r in rows.rename(columns={"pass": "pass_"}).itertuples()}
    if not set(PASSES) <= set(times):
        return Markdown("")
    guessed = [f"{pass_} {time(BATCH * times[pass_])} ms" for pass_ in PASSES]
    return Markdown(
        f"An expectation: one causal head of {MIDDLE} at {style.tokens(LONGEST)} tokens took "
        f"{time(times['forward'])} ms forward and {time(times['backward'])} ms backward in that "
        f"sweep; {BATCH} of them would take {' and '.join(guessed)}."
    )


def _gpu(row) -> float:
    """The GPU's time of a row: of the replay, or as called where that is shorter or all there is,
    since a call takes the GPU no longer than the host waits for it."""
    return float(row.ms if pd.isna(row.ms_graph) else min(row.ms, row.ms_graph))

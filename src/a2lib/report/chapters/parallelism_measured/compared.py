"""Every pass beside its prediction, and PyTorch's own ways beside ours."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters.parallelism_measured.answer import (
    mesh_name,
    regime,
    schemes,
    signed,
)
from a2lib.report.chapters.parallelism_measured.rows import (
    BACKENDS,
    PASSES,
    Beside,
    Machine,
    share,
    stack_rows,
)
from a2lib.report.metrics import level, pick
from a2lib.report.style import listed, tokens
from a2lib.report.tables import MISSING, Markdown, Table, folded

TIMES = 4


def near(p: Beside, caption: str, name: str) -> Table:
    """How near the predictions are by scheme, and how much hides where most could."""
    lines = []
    for m in p.machines:
        for scheme, mesh in schemes(p, m):
            rows = p.of(m, scheme=scheme, mesh="x".join(map(str, mesh)))
            rows = rows[rows["phase"].isin(PASSES)].dropna(subset=["off", "ms_communication"])
            if not len(rows):
                continue
            off = rows["off"]
            closest = rows.loc[share(rows).map(math.log).abs().idxmin()]
            lines.append([
                m.label, mesh_name(scheme, mesh), len(rows),
                *map(signed, (off.min(), off.median(), off.max())),
                style.share(closest["hidden"]),
                f"{closest['phase']}, {tokens(closest['tokens'])} tokens, "
                f"d_ff {tokens(closest['d_ff'])}",
            ])  # fmt: skip
    columns = ["ranks", "scheme", "passes", "off: least", "median", "most", "hidden", "at"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def times(p: Beside, m: Machine, caption: str, name: str) -> Table:
    """Every pass of a machine beside its prediction."""
    lines = []
    for scheme, mesh in schemes(p, m):
        rows = p.of(m, scheme=scheme, mesh="x".join(map(str, mesh)))
        for row in rows.sort_values(["d_ff", "tokens", "phase"]).itertuples():
            if row.phase not in PASSES:
                continue
            binds = MISSING
            if row.ms_communication > 0:
                shares = row.messages / row.compute, row.ms_communication / row.ms_without
                binds = " / ".join(regime(pd.Series(shares)))
            lines.append([
                mesh_name(scheme, mesh), tokens(row.d_ff), tokens(row.tokens), row.phase,
                *(_ms(x) for x in (row.compute, row.ms_without, row.messages,
                                   row.ms_communication, row.clock, row.ms)),
                signed(row.off), binds,
            ])  # fmt: skip
    columns = ["scheme", "d_ff", "tokens", "pass", "products: predicted", "alone",
               "messages: predicted", "alone ", "together: predicted", "measured", "off",
               "binds: predicted / found"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=4)


def all_times(p: Beside) -> Markdown:
    """A table of times for each machine, folded away."""
    if not p.machines:
        return Markdown(p.not_yet("the times of any pass"))
    made = []
    for m in p.machines:
        stack = f"{m.layers} layers of d_model {m.layer.d_model:,} in {m.dtype}"
        caption = f"{m.label}: {stack}, ms on the slowest rank"
        made.append(times(p, m, caption, f"tab-beside-{m.backend}-{m.world_size}"))
    return Markdown("\n".join(folded(table) for table in made))


def peers(p: Beside, caption: str, name: str) -> Table:
    """Forward and backward by PyTorch's own wrappers beside ours."""
    lines = []
    for m in p.machines:
        theirs = stack_rows(p.table, m, "torch", phase="end_to_end")
        known = {(row.mesh, row.scheme, row.tokens, row.d_ff): row
                 for row in p.of(m, phase="end_to_end").itertuples()}  # fmt: skip
        for scheme, mesh in schemes(p, m):
            of = pick(theirs, scheme=scheme, mesh="x".join(map(str, mesh))).sort_values("tokens")
            for row in of.itertuples():
                ours = known.get((row.mesh, row.scheme, row.tokens, row.d_ff))
                if ours is None:
                    continue
                ratio = f"{row.ms / ours.ms:.2f}"
                lines.append([
                    m.label, mesh_name(scheme, mesh), tokens(row.tokens), _ms(ours.ms),
                    _ms(row.ms), f"**{ratio}**" if level(ours, row) else ratio,
                    "one run" if row.run == ours.run else "two",
                ])  # fmt: skip
    columns = ["ranks", "scheme", "tokens", "ours, ms", "PyTorch's, ms", "PyTorch's / ours",
               "both of"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=3)


def all_peers(p: Beside, caption: str, name: str) -> Markdown:
    """How PyTorch's stand to ours, and the table, folded away."""
    table = peers(p, caption, name)
    if not len(table.frame):
        return Markdown(p.not_yet("PyTorch's own ways of the same layers"))
    told = []
    for ranks, group in table.frame.groupby("ranks", sort=False):
        ratios = group["PyTorch's / ours"].str.strip("*").astype(float)
        each = [f"{some.min():.2f} to {some.max():.2f} under {scheme}"
                for scheme, some in ratios.groupby(group["scheme"], sort=False)]  # fmt: skip
        told.append(f"{ranks}: {listed(each)} times the time of ours, "
                    f"{ratios.median():.2f} in the middle of {len(ratios)}")  # fmt: skip
    told = f"PyTorch's take with {'; with '.join(told)}. {_growth(table.frame)}".rstrip()
    apart = int((table.frame["both of"] != "one run").sum())
    if apart:
        told += (
            f" In {apart} of the {len(table.frame)} pairs ours and PyTorch's are of two runs, "
            "perhaps on two machines: there a few percent are no difference."
        )
    return Markdown(f"{told}\n\n{folded(table)}")


def _growth(lines: pd.DataFrame) -> str:
    """How both grow on GPUs from the smallest batch to ``TIMES`` times as many tokens: what does
    not grow is neither's products."""
    told, lines = [], lines[lines["ranks"].str.startswith(BACKENDS["nccl"][0])]
    for (ranks, scheme), group in lines.groupby(["ranks", "scheme"], sort=False):
        at = {int(row.iloc[2].replace(",", "")): row for _, row in group.iterrows()}
        first = min(at)
        if TIMES * first not in at:
            continue
        ours, theirs = (float(at[TIMES * first][of]) / float(at[first][of])
                        for of in ("ours, ms", "PyTorch's, ms"))  # fmt: skip
        told.append(f"{ours:.2f} and {theirs:.2f} times as long ({scheme}, {ranks})")
    if not told:
        return ""
    return (
        f"With {TIMES} times the smallest batch's tokens ours and PyTorch's take "
        f"{listed(told)}. What does not grow with the batch is messages of weights, which tensor "
        "parallelism has none of, and the host's work."
    )


def _ms(value: float) -> str:
    return MISSING if pd.isna(value) else style.digits(float(value))

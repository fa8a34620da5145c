"""Where times differ from what is predicted: by what is slower alone, and by both at once."""

from __future__ import annotations

import math

import pandas as pd

from a2lib.report.chapters.parallelism_measured import links, overlap
from a2lib.report.chapters.parallelism_measured.answer import (
    MAIN,
    both,
    case,
    machine,
    mesh_name,
    regime,
    schemes,
    signed,
)
from a2lib.report.chapters.parallelism_measured.rows import (
    PARTS,
    PASSES,
    SLOWER,
    Beside,
    Machine,
    share,
)
from a2lib.report.style import digits, listed, tokens
from a2lib.report.tables import Markdown, Table
from a2lib.theory.latency import Line

NEAR = 2  # products and messages of which neither takes more times as long are near each other
GIB = 2**30
# Tensors of the hidden's size that the elementwise work of a layer reads and writes: silu, a
# product; and backward silu, two products and silu's own backward.
TOUCHED = {"forward": 2 + 3, "backward": 2 + 3 + 3 + 3}


def sending(p: Beside, m: Machine) -> pd.DataFrame:
    """Forward and backward passes of a machine that send, with the parts of what they are off."""
    rows = p.of(m)
    return rows[rows["phase"].isin(PASSES)].dropna(subset=["ms_communication", *SLOWER])


def parts(p: Beside, caption: str, name: str) -> Table:
    """What times are off on average and what it is made of, by scheme and by what should bind."""
    lines = []
    for m in p.machines:
        rows = sending(p, m)
        for scheme, mesh in schemes(p, m):
            own = rows[(rows["scheme"] == scheme) & (rows["mesh"] == "x".join(map(str, mesh)))]
            for binds, group in own.groupby(regime(own["messages"] / own["compute"])):
                means = group[["off", *SLOWER]].mean()
                lines.append([m.label, mesh_name(scheme, mesh), binds, len(group),
                              *map(signed, means)])  # fmt: skip
    columns = ["ranks", "scheme", "should bind", "passes", "off, mean", "products alone",
               "messages alone", "both at once"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=3, keys=3)


def told(p: Beside, backend: str) -> Markdown:
    """Of each number of ranks: what products alone reach of C, how much runs at once, where that
    costs most; and what the ranks ran on."""
    found = []
    for m in p.machines:
        if m.backend == backend and len(sending(p, m)):
            said = (products(p, m), overlap.by_themselves(p, m), overlap.said(p, m), _near(p, m))
            said = filter(None, said)
            found.append(f"- {m.label}. {' '.join(said)}")
    ran_on = overlap.conditions(p, backend) if found else ""
    return Markdown("\n".join([*found, *(["", ran_on] if ran_on else [])]))


def products(p: Beside, m: Machine) -> str:
    """The share of C that data parallelism's products reach, by batch."""
    rows = p.of(m, scheme="dp", phase="backward", d_ff=m.layer.d_ff).sort_values("tokens")
    rows = rows.dropna(subset=["ms_without", "compute"])
    if len(rows) < 3:
        return ""
    reached = (rows["compute"] / rows["ms_without"]).tolist()
    best = max(range(len(reached)), key=reached.__getitem__)
    said = [f"{reached[k]:.0%} of C at {tokens(rows['tokens'].iloc[k])} tokens"
            for k in sorted({0, best, len(reached) - 1})]  # fmt: skip
    return f"Backward, data parallelism's products alone reach {listed(said)}."


def _near(p: Beside, m: Machine) -> str:
    """Whether both at once cost most where both take about as long."""
    rows = sending(p, m)
    near = share(rows).map(math.log).abs() <= math.log(NEAR)
    if near.all() or not near.any():
        return ""
    at, far = both(rows[near]).mean(), both(rows[~near]).mean()
    return (
        f"Where neither takes more than {NEAR} times as long as the other, both at once cost "
        f"{signed(at)} on average, elsewhere {signed(far)}; the most is "
        f"{signed(both(rows).max())} ({case(rows.loc[both(rows).idxmax()])})."
    )


def elementwise(p: Beside) -> Markdown:
    """What C has in it beside products."""
    m = machine(p, *MAIN)
    if m is None or not p.bandwidth:
        return Markdown("")
    said = []
    for pass_, touched in TOUCHED.items():
        # Both are for a token of a column of the hidden.
        moved = touched * m.layer.element_bytes / (p.bandwidth * 1e12)
        computed = (6 if pass_ == "forward" else 12) * m.layer.d_model / m.layer.flops
        said.append(f"{moved / computed:.0%} {pass_}")
    return Markdown(
        f"The elementwise work of a layer is in C, too: its bytes at {p.bandwidth:.2f} TB/s, "
        f"what a copy reaches, are {listed(said)} of the time that C gives the products."
    )


def messages(p: Beside) -> Markdown:
    """What the collectives' own rows say of the messages of FSDP and of tensor parallelism."""
    m, line = machine(p, *MAIN), links.fitted(p)
    if m is None or line is None:
        return Markdown("")
    return Markdown(" ".join(filter(None, (_calls(p), _sums(p, m, line)))))


def _calls(p: Beside) -> str:
    """The bus bandwidth of each call that a scheme makes."""
    found = {name: p.collectives.row("{} {}".format(*MAIN), GIB, call)
             for call, name in links.CALLS.items()}  # fmt: skip
    if not all(row is not None and row.status == "ok" for row in found.values()):
        return ""
    rates = listed([f"{digits(row.bus)} GB/s in {name}" for name, row in found.items()])
    return (
        f"[By themselves](collectives.md), in other runs and with 1 GiB, NCCL reaches {rates}, by "
        "the ring's count: W is of the first, FSDP sends by the other two."
    )


def _sums(p: Beside, m: Machine, line: Line) -> str:
    """The shortest sums of tensor parallelism, whose latency the formulas leave out."""
    rows = p.of(m, scheme="tp", phase="forward", d_ff=m.layer.d_ff)
    rows = rows.dropna(subset=["ms_communication"])
    if not len(rows):
        return ""
    row, sums = rows.loc[rows["tokens"].idxmin()], m.layers * PARTS
    size = m.of(row["tokens"], m.layer.d_ff).activation_bytes / PARTS
    return (
        f"The {sums} sums of tensor parallelism's forward at {tokens(row['tokens'])} tokens have "
        f"{digits(size / 1e6)} MB each. By bytes alone they take {digits(row['messages'])} ms, by "
        f"the line fitted to all-reduces in a row, which has a latency, "
        f"{digits(1e3 * sums * line.time_s(size))} ms; they took "
        f"{digits(row['ms_communication'])} ms."
    )

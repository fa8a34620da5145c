"""How much ran at once, in words, and which runs and which machine the rows are of."""

from __future__ import annotations

import pandas as pd

from a2lib.report.chapters.collectives import line
from a2lib.report.chapters.measured import SWITCHES
from a2lib.report.chapters.parallelism_measured.rows import (
    NAMES,
    Beside,
    Machine,
    stack_rows,
)
from a2lib.report.metrics import pick
from a2lib.report.style import digits, listed
from a2lib.report.tables import Markdown

LITTLE = 0.25  # of the shorter of products and messages: less than this counts as not hidden


def hidden(p: Beside, m: Machine, scheme: str) -> float:
    """The share of the shorter of products and messages that ran beside the longer, backward: the
    median over the batches. Below 0 both took longer at once than one after the other; NaN where
    there is no row."""
    rows = p.of(m, scheme=scheme, phase="backward", d_ff=m.layer.d_ff)
    return float(rows["hidden"].median())


def shares(p: Beside, m: Machine) -> dict[str, float]:
    """``hidden`` of each scheme that has rows, by its name."""
    found = {name: hidden(p, m, scheme) for scheme, name in NAMES.items()}
    return {name: share for name, share in found.items() if not pd.isna(share)}


def said(p: Beside, m: Machine) -> str:
    """The shares of a machine in a sentence, and what one below 0 means."""
    found = shares(p, m)
    if not found:
        return ""
    told = [f"{_amount(share)} under {_scheme(name)}" for name, share in found.items()]
    text = (
        "Backward, of the shorter of products and messages this much ran beside the longer, in the "
        f"middle of the batches: {listed(told)}."
    )
    longer = [_scheme(name) for name, share in found.items() if share < 0]
    if longer:
        text += (
            f" Under {listed(longer)} both at once take longer than one after the other; why was "
            "not tested."
        )
    return text


def _amount(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "nothing"


def _scheme(name: str) -> str:
    return name.replace("parallel", "parallelism")


def beside(p: Beside, m: Machine, main: Machine) -> str:
    """Whether messages hide on ``m`` as they do on ``main``, for the first screen; "" where either
    lacks the rows."""
    here, there = ([hidden(p, one, scheme) for scheme in ("dp", "fsdp")] for one in (m, main))
    if any(map(pd.isna, here + there)):
        return ""
    little = max(here) < LITTLE
    return (
        f"{'but' if little else 'and'} of the shorter of both {_amount(here[0])} runs beside the "
        f"longer under data parallelism and {_amount(here[1])} under FSDP, where NCCL's is "
        f"{_amount(there[0])} and {_amount(there[1])} (backward, in the middle of the batches)"
    )


def conditions(p: Beside, backend: str) -> str:
    """What a backend's processes ran on, or the switches that NCCL had."""
    rows = p.table[p.table["backend"] == backend]
    known = sorted({x for x in rows["conditions"] if x})
    if not known:
        return ""
    if backend == "gloo":
        return f"gloo's processes ran on {' and '.join(known)}, each with its share for threads."
    return f"NCCL had {listed([SWITCHES.get(s, s) for s in known])}."


def by_themselves(p: Beside, m: Machine) -> str:
    """What the line of gloo's own all-reduces gives the messages that W is of; "" without one."""
    found = line.fitted(p.collectives, f"{m.backend} {m.world_size}")
    rows = p.of(m, scheme="dp", phase="backward", d_ff=m.layer.d_ff)
    took = rows["ms_communication"].astype(float).median()
    if m.backend != "gloo" or found is None or pd.isna(took):
        return ""
    sums = pick(p.collectives.table, backend=m.backend)
    known = sorted({x for x in sums["conditions"] if x})
    on = f" on {listed(known)}" if known else ""
    said = 1e3 * m.layers * found.time_s(m.layer.weight_bytes)
    return (
        f"To W's {m.layers} messages of {digits(m.layer.weight_bytes / 1e6)} MB the line fitted to "
        f"[all-reduces by themselves](collectives.md), of other runs{on}, gives {digits(said)} ms "
        f"one after the other; here, all started at once, they took {digits(took)} ms."
    )


def runs(p: Beside) -> Markdown:
    """Whether what is set side by side is of one run, for each number of ranks."""
    told = []
    for m in p.machines:
        ours = p.of(m)["run"]
        main = ours.mode().iloc[0]
        text = f"{m.label}: ours are of the run `{main}`"
        others = sorted(set(ours) - {main})
        if others:
            text += f", but {int((ours != main).sum())} of {len(ours)} of {_named(others)}"
        theirs = stack_rows(p.table, m, "torch")["run"]
        others = sorted(set(theirs) - {main})
        if others:
            text += (f", {int((theirs != main).sum())} of PyTorch's {len(theirs)} of "
                     f"{_named(others)}")  # fmt: skip
        elif len(theirs):
            text += ", and so are PyTorch's"
        told.append(text)
    if not told:
        return Markdown("")
    return Markdown(
        f"{'; '.join(told)}. Another run may be of another machine; its rows are set beside these "
        "only where a table says so."
    )


def _named(names: list[str]) -> str:
    return listed([f"`{name}`" for name in names])

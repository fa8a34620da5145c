"""Against the first stage of ZeRO: bytes moved, memory, and time by the link."""

from __future__ import annotations

import pandas as pd

from a2lib.report.chapters.measured import time
from a2lib.report.chapters.sharded_optimizer.rows import (
    WORLD_SIZE,
    Sharding,
    gb,
    weight_bytes,
)
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from a2lib.theory.sharding import sent, zero_stage_1_bytes

SCHEMES = {
    "plain": "AdamW",
    "sharded": "ours",
    "zero1": "ZeRO stage 1",
}
ROWS = {"plain": "plain", "sharded": "sharded"}
LEVEL = 0.01  # what is counted may differ by so much: norms' padding, flags


def table(c: Sharding, caption: str, label: str) -> Table:
    """Bytes that the collectives are given, as counted; those a rank sends; their least time."""
    lines = []
    for scheme, words in SCHEMES.items():
        found = sent(scheme, weight_bytes(), WORLD_SIZE)
        row = c.held(ROWS[scheme], "step") if scheme in ROWS else None
        counted = [MISSING] * 2
        if row is not None:
            counted = [gb(row.reduced_bytes), gb(row.gathered_bytes)]
        lines.append([words, *counted, gb(found.all_reduce + found.reduce_scatter),
                      gb(found.all_gather), gb(found.total), time(1e3 * found.total / c.link),
                      _fitted(c, scheme)])  # fmt: skip
    columns = ["", "counted: reduced", "gathered", "sent for gradients", "for weights", "in all",
               "ms at the maker's link", "by measured lines"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=1, keys=1)


def _fitted(c: Sharding, scheme: str) -> str:
    """Milliseconds by the bandwidth that all-gathers reach on the same ranks: each collective is
    rounds of it."""
    line = c.gathers()
    if line is None:
        return MISSING
    # The line's bandwidth is of the whole tensor; a link carries (N - 1) / N of it.
    link = line.bandwidth * (WORLD_SIZE - 1) / WORLD_SIZE
    given = (weight_bytes(), WORLD_SIZE, link)
    seconds = {
        "plain": all_reduce_s(*given),
        "sharded": all_reduce_s(*given) + all_gather_s(*given),
        "zero1": reduce_scatter_s(*given) + all_gather_s(*given),
    }[scheme]
    return time(1e3 * (line.overhead_s + seconds))


def sentence(c: Sharding) -> Markdown:
    """optimizer_state_sharding_accounting (c), in words."""
    ours, paper, plain = (sent(s, weight_bytes(), WORLD_SIZE).total
                          for s in ("sharded", "zero1", "plain"))  # fmt: skip
    text = (
        f"Ours sends {ours / plain:.1f} times what a step without sharding does, {gb(ours)} GB "
        f"from each GPU in place of {gb(plain)}: it takes gradients that have been averaged "
        "everywhere, of which a rank uses its own part alone. ZeRO's stage 1 sums on each rank "
        f"only the gradients of that part: {gb(paper)} GB, {paper / plain:.1f} times."
    )
    return Markdown(f"{text} {counted(c)}")


def counted(c: Sharding) -> str:
    """Whether the calls of a step were given the formula's bytes."""
    rows = {optimizer: c.held(optimizer, "step") for optimizer in ROWS.values()}
    if None in rows.values():
        return c.not_yet("the bytes that the collectives of a step are given, by its calls")
    size = weight_bytes()
    expected = {"plain": (size, 0), "sharded": (size, size)}
    worst = max(
        abs(float(got) - want) / size
        for optimizer, row in rows.items()
        for got, want in zip((row.reduced_bytes, row.gathered_bytes), expected[optimizer],
                             strict=True)
    )  # fmt: skip
    verdict = "as the formula has it" if worst <= LEVEL else "which is not the formula's"
    one = rows["sharded"]
    return (
        f"Counted from the calls of a step, all-reduces are given {gb(one.reduced_bytes)} GB and "
        f"all-gathers end with {gb(one.gathered_bytes)}, {verdict} (to {worst:.2%})."
    )


def state(c: Sharding) -> Markdown:
    """Memory a parameter against the paper's, and why its factor is larger."""
    lines = [(n, 8 + 8 / n, zero_stage_1_bytes(n)) for n in (1, WORLD_SIZE, 8, 64)]
    told = "; ".join(f"{n} rank{'s' if n > 1 else ''}: {ours:.4g} and {theirs:.4g}"
                     for n, ours, theirs in lines)  # fmt: skip
    most, least = lines[0][1], 8
    return Markdown(
        "Bytes a parameter, ours and the paper's by the number of ranks: "
        f"{told}. Ours can at most halve {most:.0f} to {least}, since fp32 weights and gradients "
        "stay whole. The paper's weights and gradients have 16 bits, and its fp32 weights belong "
        f"to the state that is divided, so that {zero_stage_1_bytes(1):.0f} bytes approach 4. "
        "Dividing the gradients too is its stage 2, and the weights its stage 3, which is FSDP."
    )

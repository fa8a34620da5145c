"""The first screen: the answer with its number and its reason, and the table of the landing page.
"""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics, style, tables
from a2lib.report.chapters.flash import board, standing
from a2lib.report.chapters.flash import memory as parts
from a2lib.report.chapters.flash.rows import (
    BYTES,
    COMPARED,
    DTYPES,
    HEAD_DIMS,
    LENGTHS,
    LONGEST,
    UNKNOWN,
    Flash,
    ms,
    unit,
)
from a2lib.report.chapters.flash.shapes import with_tflops
from a2lib.report.chapters.flash.view import LOOKS, PASSES
from a2lib.report.metrics import OURS, compare, pick, row_of, time_of, timed_row
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table


def numbers(flash: Flash) -> dict[str, str]:
    """The chapter's glued numbers, with units; UNKNOWN for what has not been measured."""
    total = time_of(flash.leaderboard, implementation=OURS, pass_="end_to_end")
    rate = _rate(flash)
    return {
        "leaderboard_end_to_end": ms(total),
        "leaderboard_tflops": unit(rate, "TFLOP/s"),
        "leaderboard_share": percent(rate, flash.ceilings.get("bf16")),
        "leaderboard_share_sheet": percent(rate, flash.sheet("bf16_dense")),
        **{f"longest_{name}": ms(_longest(flash, name)) for name in (OURS, "eager")},
        "matrix_longest": style.size(float(LONGEST**2 * BYTES["bf16"])),
    }


def sentence(flash: Flash) -> Markdown:
    """The chapter's answer: the time, the standing, the reason, the memory."""
    n = numbers(flash)
    if n["leaderboard_end_to_end"] == UNKNOWN:
        return Markdown(
            "**The answer** is not measured yet: the data hold no time of ours at "
            f"the leaderboard's shape on an {flash.device}. What follows shows what there is."
        )
    text = (
        f"**The answer.** On one {flash.device}, forward and backward take "
        f"**{n['leaderboard_end_to_end']}** at the shape of the course's 2025 leaderboard "
        f"(16 heads of 64, 16,384 tokens, causal, bf16): {n['leaderboard_tflops']}"
    )
    if n["leaderboard_share"] != UNKNOWN:
        text += f", {n['leaderboard_share']} of the best matrix product measured there"
    answer = [f"{text}.", standing_sentence(flash), reason(flash)]
    beside = [board.in_short(flash), memory_sentence(flash)]
    paragraphs = (" ".join(part for part in said if part) for said in (answer, beside))
    return Markdown("\n\n".join(filter(None, paragraphs)))


def standing_sentence(flash: Flash) -> str:
    """Ours end to end beside the fastest peer and beside eager, at the leaderboard's shape."""
    total = pick(flash.leaderboard, pass_="end_to_end")
    ours = timed_row(total, implementation=OURS)
    peer, eager = standing.best_peer(total), timed_row(total, implementation="eager")
    words = []
    if ours and peer:
        words.append(f"{_beside(ours, peer)}, the fastest peer")
    if ours and eager:
        words.append(_beside(ours, eager))
    return f"It {', and '.join(words)}." if words else "No peer is measured at this shape yet."


def reason(flash: Flash) -> str:
    """Why it stands as it does: forward and backward apart, and the products that each executes."""
    words = []
    for pass_ in ("forward", "backward"):
        rows = pick(flash.leaderboard, pass_=pass_)
        ours, peer = timed_row(rows, implementation=OURS), standing.best_peer(rows)
        if not (ours and peer):
            return ""
        label = LOOKS.of(peer.implementation).label
        words.append(f"the {pass_} {compare(ours, peer)} {label}")
    text = f"Taken apart, {listed(words)}"
    if metrics.level(ours, peer) or ours.ms < peer.ms:
        return f"{text}."
    return (
        f"{text}: ours executes {standing.PRODUCTS} matrix products where {standing.FEWEST} "
        "suffice, the price of gradients that are the same bits every run."
    )


def memory_sentence(flash: Flash) -> str:
    """Memory at the longest sequence, ours and eager's, and why."""
    ours, eager = memory(flash, OURS), memory(flash, "eager")
    if UNKNOWN in (ours, eager):
        return ""
    where = f"At {style.tokens(LONGEST)} tokens and one head of 64 in bf16"
    text = f"{where} it needs {ours} of memory beyond its inputs, which is its results and two "
    text += "numbers per token"
    if eager == "oom":
        return f"{text}; eager, which holds whole $N \\times N$ matrices, runs out of it."
    held = parts.matrices(parts.end_to_end(flash, "eager"))
    return f"{text}, and eager {eager}, which is {held:.1f} matrices of $N \\times N$."


def memory(flash: Flash, implementation: str) -> str:
    """Peak memory end to end at the longest sequence, one head of 64, bf16, in words."""
    row = row_of(flash.handout, implementation=implementation, dtype="bf16", head_dim=64,
                 seq_len=LONGEST, pass_="end_to_end")  # fmt: skip
    if row is None:
        return UNKNOWN
    if row.status != "ok":
        return style.STATUS.get(row.status, UNKNOWN)
    return UNKNOWN if pd.isna(row.peak_bytes) else style.size(float(row.peak_bytes))


def results(flash: Flash, caption: str, name: str) -> Table:
    """The chapter's results for the landing page: ours, the best peer, eager, the evidence."""
    at = f"{style.tokens(LONGEST)} tokens, 1 head of 64"
    longest = pick(flash.handout, head_dim=64, seq_len=LONGEST)
    shapes = [
        ("2025 leaderboard shape, bf16", flash.leaderboard, "fig-flash-leaderboard"),
        (f"{at}, bf16", pick(longest, dtype="bf16"), "tab-flash-latency-bf16"),
        (f"{at}, fp32", pick(longest, dtype="fp32"), "tab-flash-latency-fp32"),
    ]
    lines = []
    for title, rows, evidence in shapes:
        rows = pick(rows, pass_="end_to_end")
        best = standing.best_peer(rows)
        peer = tables.MISSING if best is None else (
            f"{style.digits(best.ms)} ms, {LOOKS.short(best.implementation)}")
        cells = []
        for implementation in (OURS, "eager"):
            row = row_of(rows, implementation=implementation)
            timed = row is not None and row.status == "ok"
            text = tables.shown(row) if row is not None else tables.MISSING
            cells.append(f"{text} ms" if timed else text)
        lines.append([title, f"**{cells[0]}**", peer, cells[1], f"{{numref}}`{evidence}`"])
    columns = ["forward + backward", "ours", "best peer", "eager", "evidence"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=5)


def behind_results(flash: Flash) -> pd.DataFrame:
    """The rows of the shapes of results(): what its figures come from."""
    longest = pick(flash.handout, head_dim=64, seq_len=LONGEST)
    return pick(pd.concat([flash.leaderboard, longest]), pass_="end_to_end")


def completeness(flash: Flash) -> Markdown:
    """Whether the handout's whole sweep is there, and if not, what is missing."""
    cells = len(LENGTHS) * len(HEAD_DIMS) * len(PASSES)
    lacking = []
    for dtype in DTYPES:
        if not len(pick(flash.handout, dtype=dtype)):
            lacking.append(f"anything in {dtype}")
            continue
        for name in COMPARED:
            rows = pick(flash.handout, implementation=name, dtype=dtype)
            rows = rows[rows["seq_len"].isin(LENGTHS) & rows["head_dim"].isin(HEAD_DIMS)]
            if len(rows) < cells:
                missing = f"{cells - len(rows)} of {cells}"
                lacking.append(f"{LOOKS.of(name).label} in {dtype} ({missing})")
    if not len(flash.handout):
        return Markdown(f"**Nothing of this sweep is measured yet on an {flash.device}.**")
    if lacking:
        return Markdown(f"**This sweep is not complete.** Not measured: {listed(lacking)}.")
    total = len(DTYPES) * len(COMPARED) * cells
    return Markdown(
        f"The sweep is complete: each of its {total:,} cells holds a time or a reason why "
        "there is none."
    )


def percent(part: float | None, whole: float | None) -> str:
    """A share in whole per cent, or UNKNOWN."""
    return UNKNOWN if not part or not whole else f"{100 * part / whole:.0f} %"


def _rate(flash: Flash) -> float | None:
    rows = with_tflops(pick(flash.leaderboard, implementation=OURS, pass_="end_to_end"))
    rates = rows["tflops"].dropna()
    return float(rates.iloc[0]) if len(rates) else None


def _longest(flash: Flash, name: str) -> float | None:
    return time_of(flash.handout, implementation=name, dtype="bf16", head_dim=64,
                   seq_len=LONGEST, pass_="end_to_end")  # fmt: skip


def _beside(ours, theirs) -> str:
    label = LOOKS.of(theirs.implementation).label
    return f"{compare(ours, theirs)} {label} ({style.digits(theirs.ms)} ms)"

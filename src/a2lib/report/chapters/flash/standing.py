"""Where ours leads, ties and trails, pass by pass, on the GPU and as called."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics, style, tables
from a2lib.report.chapters.flash.rows import DTYPES, Flash, span, subject
from a2lib.report.chapters.flash.shapes import fastest, tally, with_tflops
from a2lib.report.chapters.flash.view import LOOKS, PASSES
from a2lib.report.metrics import OURS, pick, timed_row
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table

# Products of our two backward kernels, and of one that makes dq, dk and dv in a single sweep.
PRODUCTS, FEWEST = 7, 5


def best_peer(rows: pd.DataFrame):
    """The fastest row that is neither ours nor eager's; None where no peer has a time."""
    peers = rows[~rows["implementation"].isin([OURS, "eager"])].dropna(subset=["ms"])
    return next(iter(peers.sort_values("ms").itertuples()), None)


def by_pass(flash: Flash, caption: str, name: str) -> Table:
    """How often ours is ahead, level and behind the best of the others, by the GPU's time and as
    called."""
    lines = []
    for dtype in DTYPES:
        for pass_, title in PASSES.items():
            rows = pick(flash.handout, dtype=dtype, pass_=pass_)
            cells = []
            for counted in (metrics.by_graph(rows), rows):
                count = tally(counted)
                cells += [str(count[verdict]) for verdict in ("ahead", "level", "behind")]
            lines.append([f"{dtype} {title}", *cells])
    columns = ["shapes where ours is", "ahead", "level", "behind"]
    columns += [f"{verdict} as called" for verdict in columns[1:]]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def where(flash: Flash) -> Markdown:
    """Where ours leads on the GPU in bf16, and which peer it trails most often, in a sentence."""
    parts = []
    for pass_ in ("forward", "backward"):
        rows = metrics.by_graph(pick(flash.handout, dtype="bf16", pass_=pass_))
        best = fastest(rows)
        if not len(best) or not best["factor"].notna().any():
            continue
        count = {v: int((best["verdict"] == v).sum()) for v in ("ahead", "level", "behind")}
        text = (f"of {len(best)} {PASSES[pass_]}s ours is ahead of all others in "
                f"{count['ahead']}, level with the best in {count['level']} and behind in "
                f"{count['behind']}")  # fmt: skip
        behind = best[best["verdict"] == "behind"]
        if len(behind):
            peers = behind["peer"].value_counts()
            most = min(peers.index, key=lambda peer: (-peers[peer], peer))
            text += f", most often behind {subject(most)} ({peers[most]})"
        parts.append(text)
    if not parts:
        return Markdown("Ours and a peer are not both measured yet.")
    return Markdown(f"By the GPU's own time in bf16, {'; '.join(parts)}.")


def who_leads(flash: Flash) -> Markdown:
    """Which implementation is alone in front, by dtype and pass, and where ours is furthest behind.

    By the GPU's time (metrics.by_graph). A shape whose first two tie has no winner.
    """
    lines = []
    for dtype in DTYPES:
        for pass_, title in PASSES.items():
            best = fastest(metrics.by_graph(pick(flash.handout, dtype=dtype, pass_=pass_)))
            if not len(best):
                continue
            won = best[~best["tied"]]
            words = [
                f"{subject(name)} in {(won['winner'] == name).sum()} "
                f"({span(won.loc[won['winner'] == name, 'seq_len'])})"
                for name in LOOKS.order(won["winner"])
            ]
            tied = int(best["tied"].sum())
            text = f"- **{dtype} {title}**: of {len(best)} shapes {tied} are tied"
            text += f"; alone in front is {listed(words)}." if words else "."
            behind = best[best["verdict"] == "behind"]
            if len(behind):
                worst = behind.loc[behind["factor"].idxmax()]
                text += (
                    f" Ours is furthest behind at {style.tokens(worst['seq_len'])} tokens and "
                    f"d = {worst['head_dim']}: {worst['factor']:.2f} times the time of "
                    f"{subject(worst['peer'])}."
                )
            lines.append(text)
    return Markdown("\n".join(lines) or "Nothing measured yet.")


def paper_answer(flash: Flash) -> Markdown:
    """Ours and the best peer at the longest of the paper's causal shapes, in TFLOP/s."""
    rows = with_tflops(pick(flash.paper, seq_len=16384, causal=True))
    lines = []
    for head_dim in (64, 128):
        words = []
        for pass_ in ("forward", "backward"):
            here = pick(rows, head_dim=head_dim, pass_=pass_)
            ours, peer = timed_row(here, implementation=OURS), best_peer(here)
            if ours and peer:
                label = LOOKS.of(peer.implementation).label
                words.append(f"{pass_} **{style.digits(ours.tflops)}** "
                             f"(best peer: {label} {style.digits(peer.tflops)})")  # fmt: skip
        if words:
            lines.append(f"- heads of {head_dim}: {listed(words)}")
    if not lines:
        return Markdown("**The answer** is not measured yet: the data hold no such rows.")
    return Markdown(
        "**The answer.** With one causal sequence of 16,384 tokens ours reaches in TFLOP/s:\n\n"
        + "\n".join(lines) + "\n\n{numref}`fig-flash-paper` has the rest."
    )  # fmt: skip


def spreads(rows: pd.DataFrame, caption: str, name: str) -> Table:
    """Median, p20, p80 and n of every implementation at one shape, a column per pass."""
    lines = []
    for implementation in LOOKS.order(rows["implementation"]):
        cells = []
        for pass_ in PASSES:
            row = metrics.row_of(rows, implementation=implementation, pass_=pass_)
            if row is None or row.status != "ok":
                cells.append(tables.MISSING if row is None else tables.shown(row))
                continue
            low, high = style.digits(row.ms_p20), style.digits(row.ms_p80)
            cells.append(f"{style.digits(row.ms)} ({low} – {high}), n = {row.n}")
        lines.append([LOOKS.short(implementation), *cells])
    columns = ["ms (p20 – p80)", *PASSES.values()]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)

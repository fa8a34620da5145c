"""Where ours leads, ties and trails, pass by pass, and what was tried of the reasons."""

from __future__ import annotations

from fractions import Fraction

import pandas as pd

from a2lib.report import metrics, style, tables
from a2lib.report.chapters.flash.rows import DTYPES, LONGEST, Flash, listed, span, subject
from a2lib.report.metrics import OURS, fastest, pick, timed_row, with_tflops
from a2lib.report.tables import Markdown, Table

# Products of our two backward kernels, and of one that makes dq, dk and dv in a single sweep.
PRODUCTS, FEWEST = 7, 5
BOUND = Fraction(FEWEST, PRODUCTS)


def best_peer(rows: pd.DataFrame):
    """The fastest row that is neither ours nor eager's; None where no peer has a time."""
    peers = rows[~rows["implementation"].isin([OURS, "eager"])].dropna(subset=["ms"])
    return next(iter(peers.sort_values("ms").itertuples()), None)


def by_pass(flash: Flash) -> Markdown:
    """Of the handout's shapes, how often ours is ahead, level and behind, by dtype and pass."""
    lines = []
    for dtype in DTYPES:
        words = []
        for pass_, title in style.PASSES.items():
            count = metrics.tally(pick(flash.handout, dtype=dtype, pass_=pass_))
            total = sum(count.values())
            if total:
                words.append(
                    f"{title} ahead of every peer in {count['ahead']} of {total}, level with the "
                    f"best in {count['level']}, behind in {count['behind']}"
                )
        lines.append(f"- **{dtype}**: {'; '.join(words)}." if words
                     else f"- **{dtype}**: nothing measured yet.")  # fmt: skip
    return Markdown("\n".join(lines))


def by_gpu_time(flash: Flash) -> Markdown:
    """The same count by the GPU's own time, where calls were also replayed from a CUDA graph."""
    rows = metrics.by_graph(flash.handout)
    if not len(rows):
        return Markdown(
            "These times hold the host's share at short lengths. The GPU's time alone, of calls "
            "replayed from a CUDA graph, is not measured."
        )
    parts = []
    for dtype in DTYPES:
        for pass_ in ("forward", "backward"):
            count = metrics.tally(pick(rows, dtype=dtype, pass_=pass_))
            if total := sum(count.values()):
                parts.append(f"{dtype} {pass_} {count['ahead']} / {count['level']} / "
                             f"{count['behind']} of {total}")  # fmt: skip
    return Markdown(
        "At short lengths these times are the host's. By the GPU's own time, of calls replayed "
        f"from a CUDA graph, ours is ahead / level / behind in: {'; '.join(parts)} (level: a "
        "median within 2 %)."
    )


def who_leads(flash: Flash) -> Markdown:
    """Which implementation is alone in front, by dtype and pass, and where ours is furthest behind.

    A shape whose first two tie has no winner.
    """
    lines = []
    for dtype in DTYPES:
        for pass_, title in style.PASSES.items():
            best = fastest(pick(flash.handout, dtype=dtype, pass_=pass_))
            if not len(best):
                continue
            won = best[~best["tied"]]
            words = [
                f"{subject(name)} in {(won['winner'] == name).sum()} "
                f"({span(won.loc[won['winner'] == name, 'seq_len'])})"
                for name in style.implementations(won["winner"])
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


def two_sweeps(flash: Flash, caption: str, name: str) -> Table:
    """Our rate as a share of cuDNN's, forward and backward by head size, beside the bound 5/7."""
    lines = []
    for head_dim in (64, 128):
        for causal in (True, False):
            cells = [f"{head_dim}", "causal" if causal else "full"]
            for pass_ in ("forward", "backward"):
                share = rate_share(flash, head_dim, causal, pass_)
                cells.append("–" if share is None else f"{share:.2f}")
            lines.append([*cells, f"{float(BOUND):.2f}"])
    columns = ["d", "mask", "forward", "backward", "5/7"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2)


def rate_share(flash: Flash, head_dim: int, causal: bool, pass_: str) -> float | None:
    """cuDNN's time over ours at the longest of the paper's shapes; None where one is missing."""
    where = {"seq_len": 16384, "head_dim": head_dim, "causal": causal, "pass_": pass_}
    ours = timed_row(flash.paper, implementation=OURS, **where)
    cudnn = timed_row(flash.paper, implementation="sdpa_cudnn", **where)
    return cudnn.ms / ours.ms if ours and cudnn else None


def why_backward(flash: Flash) -> Markdown:
    """Whether two products more explain the backward, by head size."""
    words, short = [], []
    for head_dim in (64, 128):
        shares = [rate_share(flash, head_dim, causal, "backward") for causal in (True, False)]
        shares = [share for share in shares if share is not None]
        if not shares:
            continue
        low = min(shares)
        if low >= float(BOUND):
            words.append(f"with heads of {head_dim} ours is above it, and the two products alone "
                         "would explain all that it lacks")  # fmt: skip
        else:
            words.append(f"with heads of {head_dim} it falls to {low:.2f}, below it")
            short.append(head_dim)
    if not words:
        return Markdown("Ours and cuDNN are not both measured at these shapes yet.")
    text = f"Beside the bound: {'; '.join(words)}."
    if short:
        text += (
            " Where it is below, seven products do not explain it and there is a further cause, "
            "which was not tested. Our guess is registers: with wide heads the sums of $dK$ and "
            "$dV$ leave room for 32 queries at a time, and a product of so few rows keeps the "
            "tensor cores less busy."
        )
    return Markdown(text)


def why_not_exponentials(flash: Flash) -> Markdown:
    """Whether exponentials can be what keeps our forward behind: their share falls with d."""
    shares = {d: rate_share(flash, d, True, "forward") for d in (64, 128)}
    if None in shares.values():
        return Markdown("Whether exponentials hold the forward back cannot be said before ours and "
                        "cuDNN are measured with heads of 64 and of 128.")  # fmt: skip
    text = (
        "A head of 64 needs one exponential for every 256 operations of its products, a head of "
        "128 one for every 512. Were exponentials what keeps our forward behind, it would trail "
        f"more with heads of 64. It reaches {shares[64]:.2f} of cuDNN's rate there and "
        f"{shares[128]:.2f} with heads of 128 (causal, 16,384 tokens)"
    )
    if shares[64] > shares[128]:
        return Markdown(f"{text}: the reverse, so something else does. What, was not tested; "
                        "the [estimate](#flash-estimate) leaves the traffic through L2 and "
                        "products that wait for their tiles as candidates.")  # fmt: skip
    return Markdown(f"{text}, which agrees with that reason and does not prove it.")


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
                label = style.look(peer.implementation).label
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


def fp32_leads(flash: Flash) -> Markdown:
    """Where plain attention leads in fp32, and how full the GPU is there with our tiles."""
    best = fastest(pick(flash.handout, dtype="fp32", pass_="end_to_end"))
    plain = best[best["winner"].isin(["eager", "compile"]) & ~best["tied"]]
    if not len(best):
        return Markdown("")
    if not len(plain):
        return Markdown("In fp32 no shape of the sweep is fastest in plain or compiled attention.")
    text = (
        f"In fp32, plain or compiled attention is alone in front in {len(plain)} of {len(best)} "
        f"shapes, at {span(plain['seq_len'])}. Our reading: the $N \\times N$ matrices still cost "
        "little to write and read there, and their products are one large multiplication each, "
        "which gives every multiprocessor work where one head has too few tiles."
    )
    rows = pick(flash.handout, dtype="fp32", head_dim=64, pass_="end_to_end", implementation=OURS)
    slopes = metrics.slopes(rows, "ms")
    there = [slopes[n] for n in sorted(set(plain["seq_len"])) if n in slopes]
    if there and max(there) < 1.5:
        text += (f" It holds up so far: with heads of 64 ours grows with slope {there[0]:.1f} to "
                 f"{there[-1]:.1f} there, as a GPU that is not full does.")  # fmt: skip
    elif there:
        text += (f" Against it: with heads of 64 ours grows with slope {max(there):.1f} there, as "
                 "a full GPU does.")  # fmt: skip
    return Markdown(text)


def flex_fp32(flash: Flash) -> Markdown:
    """How FlexAttention in fp32 stands to eager at the longest sequence, pass by pass."""
    words = []
    for pass_, title in style.PASSES.items():
        where = {"dtype": "fp32", "head_dim": 64, "seq_len": LONGEST, "pass_": pass_}
        flex = timed_row(flash.handout, implementation="flex", **where)
        eager = timed_row(flash.handout, implementation="eager", **where)
        if flex and eager:
            words.append(f"{title} {flex.ms / eager.ms:.2f}")
    if not words:
        return Markdown("")
    return Markdown(
        "FlexAttention in fp32 takes, as multiples of eager's time at "
        f"{style.tokens(LONGEST)} tokens with heads of 64: {listed(words)}. We have no tested "
        "explanation for it."
    )


def spreads(rows: pd.DataFrame, caption: str, name: str) -> Table:
    """Median, p20, p80 and n of every implementation at one shape, a column per pass."""
    lines = []
    for implementation in style.implementations(rows["implementation"]):
        cells = []
        for pass_ in style.PASSES:
            row = metrics.row_of(rows, implementation=implementation, pass_=pass_)
            if row is None or row.status != "ok":
                cells.append(tables.MISSING if row is None else tables.shown(row))
                continue
            low, high = style.digits(row.ms_p20), style.digits(row.ms_p80)
            cells.append(f"{style.digits(row.ms)} ({low} – {high}), n = {row.n}")
        lines.append([style.SHORT.get(implementation, implementation), *cells])
    columns = ["ms (p20 – p80)", *style.PASSES.values()]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)

"""Why ours leads and trails: each reason with the rows or counters that could have refuted it."""

from __future__ import annotations

from fractions import Fraction

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.flash import ages, counters, estimate, shapes
from a2lib.report.chapters.flash.rows import LONGEST, Flash, span
from a2lib.report.chapters.flash.shapes import fastest
from a2lib.report.chapters.flash.standing import FEWEST, PRODUCTS
from a2lib.report.chapters.flash.view import PASSES
from a2lib.report.metrics import OURS, pick, row_of, timed_row
from a2lib.report.style import listed
from a2lib.report.tables import Markdown, Table

BOUND = Fraction(FEWEST, PRODUCTS)
NEAR = 0.03  # a predicted share of cuDNN's rate that is off by less explains the measured one


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


def short(flash: Flash) -> Markdown:
    """Each reason in a sentence or two with its number; the evidence is on a page of its own."""
    lines = []
    backward, forward = ({d: rate_share(flash, d, True, pass_) for d in (64, 128)}
                         for pass_ in ("backward", "forward"))  # fmt: skip
    if None not in backward.values():
        lines.append(
            f"Backward, ours executes {PRODUCTS} products where {FEWEST} suffice "
            "([why](#flash-two-pass)), so beside one sweep of the same quality it reaches at most "
            f"{FEWEST}/{PRODUCTS}, {float(BOUND):.2f}, of the rate. It reaches "
            f"{backward[64]:.2f} of cuDNN's with heads of 64 and {backward[128]:.2f} with heads of "
            "128 (causal, 16,384 tokens)."
        )
    if None not in forward.values():
        text = (f"Forward, it reaches {forward[64]:.2f} of cuDNN's rate with heads of 64 and "
                f"{forward[128]:.2f} with heads of 128.")  # fmt: skip
        if forward[64] > forward[128]:
            text += (" Exponentials are not the reason, since a head of 128 has half as many for "
                     "its products; what is, is open.")  # fmt: skip
        lines.append(text)
    slower, ratios = _flex_in_front(flash)
    if slower:
        lines.append(
            "A short sequence of one head leaves multiprocessors idle. FlexAttention, which runs "
            f"both sweeps in one launch, has the faster bf16 backward in {len(slower)} of "
            f"{len(ratios)} shapes, at {span(slower)}."
        )
    plain, best = _plain_in_front(flash)
    if len(plain):
        lines.append(
            "In fp32 plain or compiled attention is alone in front end to end in "
            f"{len(plain)} of {len(best)} shapes, at {span(plain['seq_len'])}; our reading is "
            "that its large products fill the GPU where our tiles do not."
        )
    if not lines:
        return Markdown("Not measured yet.")
    return Markdown("\n".join(f"- {line}" for line in lines))


def fp32_leads(flash: Flash) -> Markdown:
    """Where plain attention leads in fp32, and how full the GPU is there with our tiles."""
    rows = metrics.by_graph(pick(flash.handout, dtype="fp32", pass_="end_to_end"))
    plain, best = _plain_in_front(flash)
    if not len(best):
        return Markdown("")
    if not len(plain):
        return Markdown("In fp32 no shape of the sweep is fastest in plain or compiled attention.")
    text = (
        "In fp32, by the GPU's time, plain or compiled attention is alone in front in "
        f"{len(plain)} of {len(best)} shapes, at {span(plain['seq_len'])}. Our reading: "
        "the $N \\times N$ matrices still cost little to write and read there, and their products "
        "are one large multiplication each, which gives every multiprocessor work where one head "
        "has too few tiles."
    )
    slopes = shapes.slopes(pick(rows, head_dim=64, implementation=OURS), "ms")
    there = [slopes[n] for n in sorted(set(plain["seq_len"])) if n in slopes]
    if there and max(there) < 1.5:
        text += (f" It holds up so far: with heads of 64 ours grows with slope {max(there):.1f} at "
                 "most there, as a GPU that is not full does.")  # fmt: skip
    elif there:
        text += (f" Against it: with heads of 64 ours grows with slope {max(there):.1f} there, as "
                 "a full GPU does.")  # fmt: skip
    return Markdown(text)


def flex_fp32(flash: Flash) -> Markdown:
    """How FlexAttention in fp32 stands to eager at the longest sequence, pass by pass."""
    words = []
    for pass_, title in PASSES.items():
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


def predicted(flash: Flash, head_dim: int) -> float | None:
    """Our backward's rate over cuDNN's by the counters: 5/7 times the tensor cores' busy shares."""
    ours, cudnn = (counters.of(flash, name, "backward", head_dim) for name in (OURS, "sdpa_cudnn"))
    return float(BOUND) * ours.busy / cudnn.busy if ours and cudnn else None


def why_backward(flash: Flash) -> Markdown:
    """Whether two products more explain the backward, by head size, and what the counters add."""
    words, explained = [], []
    for head_dim in (64, 128):
        measured, said = rate_share(flash, head_dim, True, "backward"), predicted(flash, head_dim)
        if measured is None:
            continue
        if said is None:
            side = "above" if measured >= float(BOUND) else "below"
            words.append(f"with heads of {head_dim} ours is {side} 5/7")
            continue
        ours, cudnn = (counters.of(flash, name, "backward", head_dim).busy
                       for name in (OURS, "sdpa_cudnn"))  # fmt: skip
        words.append(
            f"with heads of {head_dim} our tensor cores are busy for {ours:.0f} % of the time and "
            f"cuDNN's for {cudnn:.0f} %; 5/7 times that ratio is {said:.2f}, and "
            f"{measured:.2f} is measured"
        )
        explained.append(abs(said - measured) < NEAR)
    if not words:
        return Markdown("Ours and cuDNN are not both measured at these shapes yet.")
    if not explained:
        return Markdown(f"Causal, {'; '.join(words)}. Why was not tested: no counters are there.")
    text = f"The counters test it (causal): {'; '.join(words)}. "
    if all(explained):
        text += ("So the gap is the products, times how busy the tensor cores are, and nothing "
                 "else. ")  # fmt: skip
    else:
        text += "Products and tensor cores do not account for all of it; the rest was not tested. "
    return Markdown((text + _guesses(flash)).strip())


def _guesses(flash: Flash) -> str:
    """What the counters exclude as a reason for the busy share of the backward, heads of 128."""
    narrow, wide = (counters.of(flash, OURS, "backward", d) for d in (64, 128))
    cudnn = counters.of(flash, "sdpa_cudnn", "backward", 128)
    if not (narrow and wide and cudnn) or wide.busy >= cudnn.busy:
        return ""
    text = (f"Why ours are busy for {wide.busy:.0f} % and not {cudnn.busy:.0f} % with heads of 128 "
            "is open.")  # fmt: skip
    backward, forward = (counters.rate(flash, OURS, p, 128) for p in ("backward", "forward"))
    if backward and forward and backward < 0.9 * forward:
        text += (f" L2 does not bind: this pass draws {backward:.1f} TB/s from it, and our forward "
                 f"{forward:.1f}.")  # fmt: skip
    (rows64, _), (rows128, _) = (estimate.TILES[d]["backward_dkdv"] for d in (64, 128))
    if wide.tensor[-1] > narrow.tensor[-1]:
        text += (f" Nor is it that registers leave room for only {rows128} queries at a time in "
                 f"the kernel of $dK$ and $dV$: it is busy for {wide.tensor[-1]:.0f} % with them, "
                 f"and for {narrow.tensor[-1]:.0f} % with {rows64} and heads of 64.")  # fmt: skip
    return text


def why_not_exponentials(flash: Flash) -> Markdown:
    """Whether exponentials can be what keeps our forward behind: their share falls with d."""
    shares = {d: rate_share(flash, d, True, "forward") for d in (64, 128)}
    if None in shares.values():
        return Markdown("Whether exponentials hold the forward back cannot be said before ours and "
                        "cuDNN are measured with heads of 64 and of 128.")  # fmt: skip
    text = (
        "A head of 64 needs one exponential for every 256 operations of its products, a head of "
        "128 one for every 512. Were exponentials what keeps our forward behind cuDNN's, it would "
        f"trail more with heads of 64. It reaches {shares[64]:.2f} of cuDNN's rate there and "
        f"{shares[128]:.2f} with heads of 128 (causal, 16,384 tokens)"
    )
    if shares[64] <= shares[128]:
        return Markdown(f"{text}, which agrees with that reason and does not prove it.")
    ours, cudnn = (counters.of(flash, name, "forward", 128) for name in (OURS, "sdpa_cudnn"))
    if not (ours and cudnn):
        return Markdown(f"{text}: the reverse, so something else does. What, was not tested; "
                        "the [estimate](#flash-estimate) leaves the traffic through L2 and "
                        "products that wait for their tiles as candidates.")  # fmt: skip
    text += (
        f": the reverse. With heads of 128 our exponential units are busy for {ours.exp[0]:.0f} % "
        f"of the time, our tensor cores for {ours.tensor[0]:.0f} %, cuDNN's for "
        f"{cudnn.tensor[0]:.0f} %: neither is at its limit. "
    )
    return Markdown(text + _l2_at_128(flash, ours, cudnn))


def _l2_at_128(flash: Flash, ours, cudnn) -> str:
    """What L2 carries for the forward with heads of 128, beside every other call counted."""
    names = flash.counters["implementation"].unique()
    speeds = {(i, p, d): speed for i in names for p in counters.PASSES for d in counters.HEAD_DIMS
              if (speed := counters.rate(flash, i, p, d))}  # fmt: skip
    mine = speeds.get((OURS, "forward", 128))
    if mine is None:
        return "What else does was not tested."
    if mine < max(speeds.values()):
        return (f"Nor is L2, from which it draws {mine:.1f} TB/s and another call "
                f"{max(speeds.values()):.1f}. What else it is was not tested.")  # fmt: skip
    return (
        f"It draws {mine:.1f} TB/s from L2, the most of any call counted, for "
        f"{ours.l2_bytes / cudnn.l2_bytes:.1f} times cuDNN's bytes. That L2 binds there is our "
        "guess, and 128 queries a tile would test it; fewer bytes alone make no forward fast, as "
        "SDPA FlashAttention-2 shows."
    )


def few_tiles(flash: Flash) -> Markdown:
    """Where FlexAttention's backward, one launch for both sweeps, is faster than our two."""
    slower, ratios = _flex_in_front(flash)
    ends = [n for n, d in sorted(ratios) if d == 64]
    if not slower or len(ends) < 2:
        return Markdown("")
    first, last = ends[0], ends[-1]
    text = (f"On the GPU our bf16 backward is slower than FlexAttention's in {len(slower)} of "
            f"{len(ratios)} shapes, at {span(slower)}; with heads of 64 it takes "
            f"{ratios[first, 64]:.2f} times its time at {style.tokens(first)} tokens and "
            f"{ratios[last, 64]:.2f} times at {style.tokens(last)}.")  # fmt: skip
    if ratios[last, 64] < ratios[first, 64]:
        text += (" Our guess: its backward sweeps twice as ours does, but in one launch, so that "
                 "both sweeps share a GPU that neither fills; ours run one after the other.")
    return Markdown(text)


def launches(flash: Flash) -> Markdown:
    """What the host and the GPU need for ours and for cuDNN at the shortest length, end to end;
    and what the host needs at the leaderboard's shape."""
    found = {name: row_of(flash.handout.dropna(subset=["ms", "ms_graph", "ms_host"]),
                          implementation=name, dtype="bf16", head_dim=64, seq_len=128,
                          pass_="end_to_end") for name in (OURS, "sdpa_cudnn")}  # fmt: skip
    ours, cudnn = found.values()
    if not (ours and cudnn):
        return Markdown("What host and GPU need for a short call is not measured apart yet.")
    text = (
        "At 128 tokens, end to end, bf16, heads of 64, the GPU needs "
        f"{style.digits(ours.ms_graph)} ms for ours and {style.digits(cudnn.ms_graph)} for cuDNN, "
        f"the host {style.digits(ours.ms_host)} ms and {style.digits(cudnn.ms_host)}"
    )
    if ours.ms_graph < cudnn.ms_graph and ours.ms_host > cudnn.ms_host:
        text += (". What ours loses at short lengths it loses in Python: in a CUDA graph it is the "
                 "faster of the two")  # fmt: skip
    return Markdown(" ".join(filter(None, (f"{text}.", ages.host(flash)))))


def _plain_in_front(flash: Flash) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The fp32 shapes that plain or compiled attention leads alone end to end, and all of them."""
    rows = pick(flash.handout, dtype="fp32", pass_="end_to_end")
    best = fastest(metrics.by_graph(rows))
    return best[best["winner"].isin(["eager", "compile"]) & ~best["tied"]], best


def _flex_in_front(flash: Flash) -> tuple[list[int], dict[tuple[int, int], float]]:
    """Lengths at which FlexAttention's bf16 backward is faster, and ours over its by shape."""
    rows = metrics.by_graph(pick(flash.handout, dtype="bf16", pass_="backward"))
    ratios = {}
    for (length, head_dim), here in rows.groupby(["seq_len", "head_dim"]):
        ours, flex = (timed_row(here, implementation=name) for name in (OURS, "flex"))
        if ours and flex:
            ratios[int(length), int(head_dim)] = ours.ms / flex.ms
    return [length for (length, _), ratio in ratios.items() if ratio > metrics.LEVEL], ratios

"""Which of three things a time is: the host's, that of one long program, or of a full GPU."""

from __future__ import annotations

import pandas as pd

from a2lib.report import metrics, style
from a2lib.report.chapters.flash.rows import Flash, listed
from a2lib.report.metrics import OURS, pick, row_of
from a2lib.report.tables import MISSING, Markdown, Table

# What a doubling of the length does to the GPU's time: x 2 is slope one, x 4 is slope two. Halfway
# between neighbours is where one ends and the next begins.
REGIMES = {"launch": "launch-bound", "flat": "flat", "one": "slope one", "two": "slope two"}
HALFWAY = (0.5, 1.5)
APART = 0.1  # a sum of parts that differs by less from the whole is not remarked upon
TILE = 64  # queries of a tile in our bf16 kernels with heads of 64 (tests hold it to tiles.py)


def of_curve(rows: pd.DataFrame) -> dict[int, str]:
    """Length -> "launch", "flat", "one" or "two", of one implementation, shape and pass.

    "launch": the host needs longer to issue the call (`ms_host`) than the GPU to run it
    (`ms_graph`). Otherwise by the slope of the GPU's time over the last doubling. Lengths without
    those columns, or without half their length before them, are left out unless launch-bound.
    """
    known = rows.dropna(subset=["ms_graph"]).sort_values("seq_len")
    slopes = metrics.slopes(known, "ms_graph")
    found = {}
    for r in known.itertuples():
        length = int(r.seq_len)
        if r.ms_host > r.ms_graph:
            found[length] = "launch"
        elif length in slopes:
            slope = slopes[length]
            found[length] = "flat" if slope < HALFWAY[0] else "one" if slope < HALFWAY[1] else "two"
    return found


def table(flash: Flash, dtype: str, caption: str, name: str, head_dim: int = 64) -> Table:
    """The lengths of each regime by implementation and pass, at one head size and dtype."""
    rows = pick(flash.handout, dtype=dtype, head_dim=head_dim)
    lines = []
    for implementation in style.implementations(rows["implementation"]):
        for pass_ in ("forward", "backward"):
            here = pick(rows, implementation=implementation, pass_=pass_)
            if not here["ms"].notna().any():
                continue
            found = of_curve(here)
            cells = [_lengths([n for n, kind in found.items() if kind == regime])
                     for regime in REGIMES]  # fmt: skip
            label = style.SHORT.get(implementation, implementation)
            lines.append([f"{label}, {style.PASSES[pass_]}", *(cells if found else [MISSING] * 4)])
    return Table(pd.DataFrame(lines, columns=["tokens", *REGIMES.values()]), caption, name)


def sentence(flash: Flash) -> Markdown:
    """Up to which length ours is launch-bound, and from where on the GPU is full, by dtype."""
    parts = []
    for dtype in ("bf16", "fp32"):
        rows = pick(flash.handout, dtype=dtype, head_dim=64, implementation=OURS)
        if not rows["ms_graph"].notna().any():
            continue
        for pass_ in ("forward", "backward"):
            found = of_curve(pick(rows, pass_=pass_))
            words = [f"{name} at {_lengths([n for n, k in found.items() if k == kind])} tokens"
                     for kind, name in REGIMES.items() if kind in found.values()]  # fmt: skip
            if words:
                parts.append(f"{dtype} {pass_} is {listed(words)}")
    if not parts:
        return Markdown(
            "The GPU's time and the host's are not measured apart yet, so a flat stretch of a "
            f"curve here may be either. {_by_latency(flash)}"
        )
    return Markdown(f"With heads of 64 ours in {'; '.join(parts)}.")


def full_from(flash: Flash) -> Markdown:
    """At how many tokens one head gives every multiprocessor a tile, and how that compares."""
    n = int(flash.sheet("multiprocessors"))
    last = max(length for length in (2**k for k in range(7, 17)) if length // TILE < n)
    return Markdown(
        f"With tiles of {TILE} queries, {style.tokens(last)} tokens of one head make "
        f"{last // TILE} programs for the {n} multiprocessors of the GPU: up to there some have "
        "none, and the time is that of the program with the most keys to walk over."
    )


def apart(flash: Flash, caption: str, name: str, dtype: str = "bf16") -> Table:
    """As called, the GPU's time and the host's, end to end with heads of 64, at four lengths."""
    rows = pick(flash.handout, dtype=dtype, head_dim=64, pass_="end_to_end")
    lines = []
    for implementation in style.implementations(rows["implementation"]):
        for length in (128, 1024, 8192, 65536):
            row = row_of(rows, implementation=implementation, seq_len=length)
            if row is None or row.status != "ok":
                continue
            bound = "host" if row.ms_host > row.ms_graph else "GPU"
            known = not (pd.isna(row.ms_host) or pd.isna(row.ms_graph))
            lines.append([style.SHORT.get(implementation, implementation), style.tokens(length),
                          _spread(row), *(MISSING if pd.isna(value) else style.digits(value)
                                          for value in (row.ms_graph, row.ms_host)),
                          bound if known else MISSING])  # fmt: skip
    columns = ["", "tokens", "as called (p20 – p80)", "GPU", "host", "bound by"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def _by_latency(flash: Flash) -> str:
    """What the slopes of the times as called say of our forward, where nothing else is known."""
    words = []
    for dtype in ("bf16", "fp32"):
        rows = pick(flash.handout, dtype=dtype, head_dim=64, implementation=OURS, pass_="forward")
        slopes = metrics.slopes(rows, "ms")
        if slopes:
            least, greatest = min(slopes.values()), max(slopes.values())
            words.append(f"{dtype} from {least:.1f} to {greatest:.1f}")
    if not words:
        return ""
    return (
        "What can be said is the slope of our forward as it was called, for a doubling of the "
        f"length: in {listed(words)}, where 0 is flat, 1 one long program and 2 a full GPU."
    )


def _spread(row) -> str:
    text = style.digits(row.ms)
    if pd.isna(row.ms_p20) or pd.isna(row.ms_p80):
        return text
    return f"{text} ({style.digits(row.ms_p20)} – {style.digits(row.ms_p80)})"


def _lengths(lengths: list[int]) -> str:
    """Lengths as ranges of doublings: 128 – 1,024, 4,096."""
    parts: list[list[int]] = []
    for length in sorted(lengths):
        if parts and parts[-1][-1] * 2 == length:
            parts[-1].append(length)
        else:
            parts.append([length])
    words = [style.tokens(p[0]) if len(p) == 1
             else f"{style.tokens(p[0])} – {style.tokens(p[-1])}" for p in parts]  # fmt: skip
    return ", ".join(words) or "–"


def short_hosts(flash: Flash) -> Markdown:
    """Whether end to end costs more than forward and backward timed alone, where it is short."""
    rows = pick(flash.handout, dtype="bf16", head_dim=64, implementation=OURS)
    ratios = {}
    for length in sorted(rows["seq_len"].unique()):
        times = [metrics.time_of(rows, seq_len=length, pass_=p) for p in style.PASSES]
        if None not in times:
            ratios[int(length)] = times[2] / (times[0] + times[1])
    if len(ratios) < 2:
        return Markdown("")
    first, last = min(ratios), max(ratios)
    text = (
        f"End to end takes {ratios[first]:.2f} times forward plus backward at "
        f"{style.tokens(first)} tokens and {ratios[last]:.2f} times at {style.tokens(last)}."
    )
    if ratios[first] < 1 + APART:
        return Markdown(text)
    return Markdown(
        f"{text} The L2 cache is cleared before each sample, which keeps the GPU busy while the "
        "host runs ahead: that hides the same few tens of microseconds of host time once per "
        "sample, and end to end has the launches of both passes to hide. What is left "
        "in the sample is the host's, and another host of the same kind may take several times as "
        "long."
    )

"""What a time is made of: the GPU's by the regimes of its curve, and the host's beside it."""

from __future__ import annotations

import pandas as pd

from a2lib.report import style
from a2lib.report.chapters import measured
from a2lib.report.chapters.flash import shapes
from a2lib.report.chapters.flash.rows import Flash, subject
from a2lib.report.chapters.flash.view import LOOKS, PASSES
from a2lib.report.metrics import LEVEL, OURS, pick, row_of
from a2lib.report.style import listed
from a2lib.report.tables import MISSING, Markdown, Table

# What a doubling of the length does to the GPU's time: x 2 is slope one, x 4 is slope two. Halfway
# between neighbours is where one ends and the next begins.
REGIMES = {"flat": "flat", "one": "slope one", "two": "slope two"}
HALFWAY = (0.5, 1.5)
TILE = 64  # queries of a tile in our bf16 kernels with heads of 64 (tests hold it to tiles.py)


def of_curve(rows: pd.DataFrame) -> dict[int, str]:
    """Length -> "flat", "one" or "two", of one implementation, shape and pass.

    By the slope of the GPU's time (`ms_graph`) over the last doubling; a length without half its
    length before it is left out.
    """
    slopes = shapes.slopes(rows, "ms_graph")
    return {n: "flat" if slope < HALFWAY[0] else "one" if slope < HALFWAY[1] else "two"
            for n, slope in slopes.items()}  # fmt: skip


def launch_bound(rows: pd.DataFrame) -> list[int]:
    """Lengths at which the host needs longer to issue the call than the GPU to run it."""
    return sorted(_held(rows)["seq_len"].astype(int))


def _held(rows: pd.DataFrame) -> pd.DataFrame:
    """The launch-bound rows."""
    known = rows.dropna(subset=["ms_graph", "ms_host"])
    return known[known["ms_host"] > known["ms_graph"]]


def table(flash: Flash, dtype: str, caption: str, name: str, head_dim: int = 64) -> Table:
    """The lengths of each regime by implementation and pass, at one head size and dtype."""
    rows = pick(flash.handout, dtype=dtype, head_dim=head_dim)
    lines = []
    for implementation in LOOKS.order(rows["implementation"]):
        for pass_ in ("forward", "backward"):
            here = pick(rows, implementation=implementation, pass_=pass_)
            if not here["ms"].notna().any():
                continue
            found = of_curve(here)
            cells = [_lengths([n for n, kind in found.items() if kind == regime])
                     for regime in REGIMES]  # fmt: skip
            cells.append(_lengths(launch_bound(here)))
            label = LOOKS.short(implementation)
            lines.append([f"{label}, {PASSES[pass_]}", *(cells if found else [MISSING] * 4)])
    columns = ["tokens", *REGIMES.values(), "launch-bound"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name)


def sentence(flash: Flash) -> Markdown:
    """At which lengths ours has which slope, and where it is launch-bound, by dtype and pass."""
    parts = []
    for dtype in ("bf16", "fp32"):
        rows = pick(flash.handout, dtype=dtype, head_dim=64, implementation=OURS)
        for pass_ in ("forward", "backward"):
            here = pick(rows, pass_=pass_)
            found = of_curve(here)
            words = [f"{name} at {_lengths([n for n, k in found.items() if k == kind])}"
                     for kind, name in REGIMES.items() if kind in found.values()]  # fmt: skip
            if not words:
                continue
            bound = launch_bound(here)
            text = f"- **{dtype} {pass_}**: {listed(words)} tokens"
            text += f"; launch-bound at {_lengths(bound)}." if bound else "; never launch-bound."
            parts.append(text)
    if not parts:
        return Markdown(
            "The GPU's time and the host's are not measured apart yet, so a flat stretch of a "
            f"curve here may be either. {_by_latency(flash)}"
        )
    return Markdown("With heads of 64 the GPU's time of ours is, by the last doubling,\n\n"
                    + "\n".join(parts))  # fmt: skip


def called(flash: Flash) -> Markdown:
    """Where the times as called of launch-bound rows lie, and of whose host they are."""
    bound = _held(flash.handout)
    if not len(bound):
        return Markdown("")
    above = int((bound["ms"] > LEVEL * bound["ms_host"]).sum())
    below = bound[LEVEL * bound["ms"] < bound["ms_graph"]]
    told = [f"between the GPU's and the host's in {len(bound) - above - len(below)}"]
    if above:
        told.append(f"above the host's in {above}")
    if len(below):
        most = style.digits(1e3 * (below["ms_graph"] - below["ms"]).max(), 2)
        told.append(f"below the GPU's in {len(below)}, by at most {most} µs")
    text = f"Of the sweep's {len(bound):,} launch-bound rows it lies {listed(told)}."
    return Markdown(f"{text} {hosts(flash)}".strip())


def hosts(flash: Flash) -> Markdown:
    """Which passes' times as called are not to be compared, and which are of half a host."""
    bound, said = _held(flash.handout), []
    across = bound.groupby(["implementation", "dtype", "head_dim", "seq_len"])["run"].nunique()
    if (across > 1).any():
        said.append("The passes of our sweep are of different runs: where calls are launch-bound, "
                    "times as called compare within a pass and do not add up.")  # fmt: skip
    told = []
    for pass_, title in PASSES.items():
        here = measured.shared(pick(bound, pass_=pass_))
        if here.any():
            told.append(title if here.all() else f"{here.sum()} of {len(here)} {title}")
    if told:
        said.append(f"The times of {listed(told)} are of {measured.HALF}.")
    return Markdown(" ".join(said))


def longer_replays(flash: Flash) -> Markdown:
    """Where a replayed graph takes longer than the same call, though the host does not limit it."""
    known = flash.rows.dropna(subset=["ms", "ms_graph", "ms_host"])
    known = known[known["ms_host"] < known["ms_graph"]]
    longer = known[known["ms_graph"] > LEVEL * known["ms"]]
    if not len(longer):
        return Markdown("")
    row = longer.loc[(longer["ms_graph"] / longer["ms"]).idxmax()]
    name = subject(row["implementation"])
    return Markdown(
        f"In {len(longer)} of the {len(known):,} rows that are not launch-bound the replay takes "
        f"over 2 % longer than the call, most of all {row['ms_graph'] / row['ms']:.2f} times: "
        f"{name}, {row['dtype']} {PASSES[row['pass']]}, d = {row['head_dim']}, "
        f"{style.tokens(row['seq_len'])} tokens. We have no tested explanation."
    )


def full_from(flash: Flash) -> Markdown:
    """At how many tokens one head gives every multiprocessor a tile, and how that compares."""
    n = int(flash.sheet("multiprocessors"))
    last = max(length for length in (2**k for k in range(7, 17)) if length // TILE < n)
    return Markdown(
        f"With tiles of {TILE} queries, {style.tokens(last)} tokens of one head make "
        f"{last // TILE} programs for the {n} multiprocessors of the GPU: up to there some have "
        "none."
    )


def apart(flash: Flash, caption: str, name: str, dtype: str = "bf16") -> Table:
    """As called, the GPU's time and the host's, end to end with heads of 64, at four lengths."""
    rows = pick(flash.handout, dtype=dtype, head_dim=64, pass_="end_to_end")
    lines = []
    for implementation in LOOKS.order(rows["implementation"]):
        for length in (128, 1024, 8192, 65536):
            row = row_of(rows, implementation=implementation, seq_len=length)
            if row is None or row.status != "ok":
                continue
            bound = "host" if row.ms_host > row.ms_graph else "GPU"
            known = not (pd.isna(row.ms_host) or pd.isna(row.ms_graph))
            lines.append([LOOKS.short(implementation), style.tokens(length),
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
        slopes = shapes.slopes(rows, "ms")
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

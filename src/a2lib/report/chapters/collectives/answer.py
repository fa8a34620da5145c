"""The first screen, the tables, and how size, ranks, backend, dtype and operation interact."""

from __future__ import annotations

import pandas as pd

from a2lib.report import figures, style
from a2lib.report.chapters.collectives import line
from a2lib.report.chapters.collectives.rows import (
    BANDWIDTH,
    HANDOUT,
    LARGE,
    MB,
    NAMES,
    SMALL,
    UNITS,
    VIEW,
    Collectives,
    backend,
    count,
    digits,
    megabytes,
)
from a2lib.report.chapters.measured import SWITCHES
from a2lib.report.metrics import pick
from a2lib.report.style import Chart, listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.collectives import all_reduce_s

MAIN, OTHER = "nccl 2", "gloo 2"
ASKED = tuple(f"{name} {n}" for name in NAMES for n in (2, 4, 6))  # by the handout
ALIKE = 0.1  # two times closer than this are taken for those of as many bytes
OTHERS = ("all_gather", "reduce_scatter", "broadcast")


def floor_ms(c: Collectives, n: int, size: float = LARGE) -> float:
    """The least time of a ring over links of the published GPU's stated bandwidth, in ms."""
    return 1e3 * all_reduce_s(size, n, c.link * 1e9)


def sentence(c: Collectives) -> Markdown:
    """What the largest and the smallest message take and why, on GPUs and on the CPU."""
    text = (
        "**The answer.** In a ring of N ranks each sends 2 (N − 1) / N of the tensor, so that "
        f"{megabytes(LARGE)} MB between two {c.short} take at least {digits(floor_ms(c, 2))} ms "
        f"over links of {c.link:.0f} GB/s in each direction."
    )
    large, small = c.ms(MAIN, LARGE), c.ms(MAIN, SMALL)
    if large is None or small is None:
        return Markdown(f"{text} {c.not_yet('what they do take')}")
    text += (
        f" NCCL takes {digits(large)} ms, {LARGE / large / 1e6:.0f} GB/s, which is "
        f"{floor_ms(c, 2) / large:.0%} of that; {megabytes(SMALL)} MB takes {digits(small)} ms, "
        f"{SMALL / small / 1e6:.0f} GB/s."
    )
    fitted = line.fitted(c, MAIN)
    if fitted:
        share = min(1.0, 1e3 * fitted.overhead_s / small)
        text += (
            f" A line through all sizes gives {digits(fitted.overhead_s * 1e6)} µs to any "
            f"message, {share:.0%} of what {megabytes(SMALL)} MB takes, and "
            f"{digits(fitted.bandwidth / 1e9)} GB/s beyond; half the bandwidth needs "
            f"{digits(fitted.half_size / MB)} MB."
        )
    slow = c.ms(OTHER, LARGE)
    if slow is not None:
        text += (
            f" gloo takes {digits(slow)} ms for the same between two processes on the CPU, "
            f"{digits(slow / large)} times as long."
        )
    return Markdown(text)


def figure(c: Collectives, dtype: str = "fp32") -> Chart:
    """Bus bandwidth of an all-reduce against its size, a line for each group of ranks."""
    return figures.grid(c.sums, "bus", VIEW, down="dtype", fixed={"dtype": dtype},
                        kind=BANDWIDTH)  # fmt: skip


def table(c: Collectives, caption: str, name: str) -> Table:
    """The handout's sizes: time and its spread, the ranks apart, both bandwidths."""
    lines = []
    for ranks in VIEW.looks.order(pick(c.table, operation="all_reduce", dtype="fp32")["ranks"]):
        for size in HANDOUT:
            row = c.row(ranks, size)
            if row is None:
                continue
            start = [NAMES[backend(ranks)], count(ranks), megabytes(size)]
            if row.status != "ok":
                why = style.STATUS.get(row.status, row.status)
                lines.append([*start, why, *[MISSING] * 5])
                continue
            spread = f"{digits(row.ms_p20)} to {digits(row.ms_p80)}"
            by_rank = [digits(x) for x in (row.ms_rank_min, row.ms_rank_median, row.ms_rank_max)]
            rates = digits(row.ms_queued), digits(row.algorithm), digits(row.bus)
            lines.append([*start, digits(row.ms), spread, " / ".join(by_rank), *rates])
    columns = ["backend", "ranks", "MB", "ms", "p20 to p80", "by rank: least / median / most",
               "queued", "algorithm, GB/s", "bus, GB/s"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=3)


def conditions(c: Collectives) -> Markdown:
    """What carried the messages: processors, NCCL's version and its switches."""
    told = []
    for name in NAMES:
        rows = pick(c.table, backend=name)
        if not len(rows):
            continue
        known = sorted({x for x in rows["conditions"] if x})
        if name == "gloo" and known:
            told.append(f"gloo's processes ran on {' and '.join(known)}")
        if name == "nccl":
            used = c.runs.loc[sorted(set(rows["run"]))]
            versions = sorted({v for v in used["nccl"] if v})
            switches = f" with {' and '.join(SWITCHES.get(s, s) for s in known)}" if known else ""
            told.append(f"NCCL was {' and '.join(versions) or 'of unknown version'}{switches}")
    return Markdown("; ".join(told) + "." if told else c.not_yet("what carried the messages"))


def interactions(c: Collectives) -> Markdown:
    """How size, number of ranks and backend act together, each against what a ring predicts."""
    told = [_size(c, ranks) for ranks in (MAIN, OTHER)] + [_ranks(c, name) for name in NAMES]
    told = [text for text in (*told, _backends(c)) if text]
    return Markdown(" ".join(told) or c.not_yet("how size, ranks and backend act together"))


def _size(c: Collectives, ranks: str) -> str:
    rates = [(size, size / ms / 1e6) for size in HANDOUT if (ms := c.ms(ranks, size))]
    if len(rates) < 2:
        return ""
    (small, low), (large, high) = rates[0], rates[-1]
    return (
        f"With {NAMES[backend(ranks)]} and {count(ranks)} {UNITS[backend(ranks)]} a message of "
        f"{megabytes(large)} MB travels {digits(high / low)} times as fast as one of "
        f"{megabytes(small)} MB."
    )


def _ranks(c: Collectives, name: str) -> str:
    size = 100 * MB
    found = [(count(r), ms) for r in c.lines() if backend(r) == name and (ms := c.ms(r, size))]
    if len(found) < 2:
        return ""
    (few, first), (many, last) = found[0], found[-1]
    expected = all_reduce_s(size, many, 1) / all_reduce_s(size, few, 1)
    return (
        f"From {few} to {many} {UNITS[name]}, {megabytes(size)} MB with {NAMES[name]} take "
        f"{digits(last / first)} times as long; a ring alone, whose ranks each send "
        f"{digits(2 * (many - 1) / many)} of the tensor and not {digits(2 * (few - 1) / few)}, "
        f"would take {digits(expected)} times as long."
    )


def _backends(c: Collectives) -> str:
    told = []
    for size in (SMALL, LARGE):
        fast, slow = c.ms(MAIN, size), c.ms(OTHER, size)
        if fast and slow:
            told.append(f"{digits(slow / fast)} at {megabytes(size)} MB")
    if not told:
        return ""
    return f"The time of gloo over NCCL's, for two ranks, is {listed(told)}."


def queued(c: Collectives) -> Markdown:
    """What of a call's time is the host's: alone, and among others in a row."""
    told = []
    for size in HANDOUT:
        row = c.row(MAIN, size)
        if row is not None and row.status == "ok" and not pd.isna(row.ms_queued):
            told.append(f"{digits(row.ms_queued)} ms at {megabytes(size)} MB ({digits(row.ms)})")
    if not told:
        return Markdown(c.not_yet("what a call takes among many in a row"))
    return Markdown(
        "A call that others follow in the queue, with NCCL on two GPUs, takes "
        f"{listed(told)}; in parentheses alone, from rest to rest, which the host has to start "
        "and to wait for. In a backward pass the first is what counts, as long as the host runs "
        "ahead."
    )


def dtypes(c: Collectives) -> Markdown:
    """Whether 16 bits take another time than 32, for as many bytes: of calls in a row, since the
    host's part of a call from rest has nothing to do with it."""
    ratios = {}
    for row in pick(c.sums, dtype="bf16", backend="nccl").sort_values("size").itertuples():
        wide = c.row(row.ranks, row.size)
        if wide is not None and not pd.isna(wide.ms_queued) and not pd.isna(row.ms_queued):
            ratios[row.ranks, row.size] = float(row.ms_queued) / float(wide.ms_queued)
    if not ratios:
        return Markdown(c.not_yet("bf16 beside fp32"))
    off = {key: ratio for key, ratio in ratios.items() if abs(ratio - 1) > ALIKE}
    each = style.between(list(ratios.values()), "{:.2f}".format)
    text = (
        f"For as many bytes, calls in a row take {each} times as long in bf16 as in fp32, over "
        f"{len(ratios)} pairs"
    )
    if not off:
        return Markdown(
            f"{text}: what counts is bytes, so gradients in 16 bits take the time of a tensor of "
            "half the size."
        )
    sizes = listed([f"{megabytes(size)} MB" for size in sorted({size for _, size in off})])
    least = min((size for _, size in ratios.keys() - off.keys()), default=None)
    if least is None or least < max(size for _, size in off):
        return Markdown(
            f"{text}: not within {ALIKE:.0%} of each other at {sizes}, so that bytes alone do not "
            "decide."
        )
    return Markdown(
        f"{text}, within {ALIKE:.0%} from {megabytes(least)} MB on: there bytes decide, and "
        f"gradients in 16 bits take the time of a tensor of half the size. At {sizes} a call is "
        "mostly overhead, which is not the same from one measurement to the next."
    )


def operations(c: Collectives, caption: str, name: str) -> Table:
    """All operations at the handout's sizes: ms and bus bandwidth."""
    lines = []
    for ranks in VIEW.looks.order(c.table["ranks"]):
        for size in HANDOUT:
            found = [c.row(ranks, size, operation=o) for o in ("all_reduce", *OTHERS)]
            if not any(row is not None for row in found[1:]):
                continue
            cells = []
            for row in found:
                ok = row is not None and row.status == "ok"
                why = MISSING if row is None else style.STATUS.get(row.status, row.status)
                cells += [digits(row.ms), digits(row.bus)] if ok else [why, MISSING]
            lines.append([NAMES[backend(ranks)], count(ranks), megabytes(size), *cells])
    columns = ["backend", "ranks", "MB"]
    for i, operation in enumerate(("all_reduce", *OTHERS)):
        columns += [f"{operation.replace('_', '-')}: ms", "bus, GB/s" + " " * i]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1, keys=3)


def untimed(c: Collectives) -> Markdown:
    """What has no time, each with its reason, and which of the question's groups nobody has
    measured."""
    if not len(c.table):
        return Markdown(c.not_yet("any of these"))
    told: dict[tuple, list[str]] = {}
    for row in c.table[c.table["status"] != "ok"].sort_values("size").itertuples():
        why = f"{style.STATUS.get(row.status, row.status)} ({row.note})"
        what = VIEW.looks.of(row.ranks).label, row.operation.replace("_", "-"), row.dtype, why
        told.setdefault(what, []).append(megabytes(row.size))
    lines = [f"- {label}, {operation} in {dtype}, {listed(sizes)} MB: {why}"
             for (label, operation, dtype, why), sizes in told.items()]  # fmt: skip
    left = []
    for ranks in ASKED:
        sizes = [megabytes(size) for size in HANDOUT if c.row(ranks, size) is None]
        if sizes:
            some = f" ({listed(sizes)} MB)" if len(sizes) < len(HANDOUT) else ""
            left.append(f"{VIEW.looks.of(ranks).label}{some}")
    if left:
        lines.append(f"\n**Not measured yet**, of what the question asks: {'; '.join(left)}.")
    beside = [f"{operation.replace('_', '-')} with {VIEW.looks.of(ranks).label}"
              for operation in OTHERS for ranks in c.lines()
              if (c.table["operation"] == operation).any()
              and not len(pick(c.table, operation=operation, ranks=ranks))]  # fmt: skip
    if beside:
        lines.append(f"\nNor, of the other operations: {listed(beside)}.")
    return Markdown("\n".join(lines) or "Everything that the question asks has a time.")


def halves(c: Collectives) -> Markdown:
    """An all-reduce beside the reduce-scatter and the all-gather that it is made of."""
    told = []
    for ranks in VIEW.looks.order(c.table["ranks"]):
        for size in (LARGE, 100 * MB):
            parts = [c.ms(ranks, size, operation=o) for o in ("reduce_scatter", "all_gather")]
            whole = c.ms(ranks, size)
            if whole and all(parts):
                each = " and ".join(f"{part / whole:.0%}" for part in parts)
                told.append(f"{each} with {VIEW.looks.of(ranks).label} at {megabytes(size)} MB")
                break
    if not told:
        return Markdown(c.not_yet("the other operations beside the all-reduce"))
    return Markdown(
        "In a ring an all-reduce is a reduce-scatter and then an all-gather, half of it each. "
        f"Measured, these take of its time {'; '.join(told)}.{_gloo(c)}"
    )


def _gloo(c: Collectives) -> str:
    """Why gloo's halves may take longer than the whole."""
    whole = c.ms(OTHER, 100 * MB)
    scattered = c.ms(OTHER, 100 * MB, operation="reduce_scatter")
    if not whole or not scattered or scattered < whole:
        return ""
    text = (
        " gloo's take longer than the whole: PyTorch makes its reduce-scatter of an all-reduce of "
        "a copy"
    )
    small, large = (c.ms(OTHER, n * MB, operation="all_gather") for n in (10, 100))
    if small and large and large > 20 * small:
        text += (
            f", and between two its all-gather of 100 MB takes {digits(large / small)} times as "
            "long as that of 10 MB, our guess is for memory that is taken anew for each call"
        )
    return text + "."

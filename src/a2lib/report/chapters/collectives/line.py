"""The line of latency and bandwidth: fitted, drawn, and held against the times."""

from __future__ import annotations

import pandas as pd

from a2lib.report import panels, style
from a2lib.report.chapters.collectives.rows import MB, VIEW, Collectives, digits, megabytes
from a2lib.report.metrics import pick
from a2lib.report.panels import Measure
from a2lib.report.style import Chart, Look, Looks
from a2lib.report.tables import Markdown, Table
from a2lib.theory.latency import Line, fit

POINTS = 4  # a line through fewer says nothing about its residuals
BAD = 0.1  # a residual beyond this is said to be a failure of the model
LEGEND = 3
PALE = {"#d55e00": "#a86f00"}


def points(c: Collectives, ranks: str, column: str = "ms", dtype: str = "fp32") -> pd.DataFrame:
    """size and seconds of the all-reduces between ``ranks``, by size."""
    rows = pick(c.sums, ranks=ranks, dtype=dtype).dropna(subset=[column]).sort_values("size")
    return pd.DataFrame({"size": rows["size"].astype(float),
                         "s": rows[column].astype(float) / 1e3}).reset_index(drop=True)  # fmt: skip


def fitted(c: Collectives, ranks: str, column: str = "ms", dtype: str = "fp32") -> Line | None:
    """The line through them; None where they are too few."""
    found = points(c, ranks, column, dtype)
    return fit(list(found["size"]), list(found["s"])) if len(found) >= POINTS else None


def every(c: Collectives) -> list[tuple[str, str, Line, pd.DataFrame]]:
    """(ranks, column, line, points with their residuals) of all that can be fitted."""
    made = []
    for ranks in c.lines():
        for column in ("ms", "ms_queued"):
            line = fitted(c, ranks, column)
            if line:
                found = points(c, ranks, column)
                off = line.residuals(list(found["size"]), list(found["s"]))
                made.append((ranks, column, line, found.assign(off=off)))
    return made


def table(c: Collectives, caption: str, name: str) -> Table:
    """Overhead, bandwidth, the size of half the bandwidth, and where the line is worst."""
    lines = []
    for ranks, column, line, found in every(c):
        worst = found.loc[found["off"].abs().idxmax()]
        off = style.signed(worst["off"], 0)
        lines.append([
            VIEW.looks.of(ranks).label, "alone" if column == "ms" else "in a row", len(found),
            digits(line.overhead_s * 1e6), digits(line.bandwidth / 1e9),
            digits(line.half_size / MB), f"{off} at {megabytes(worst['size'])} MB",
        ])  # fmt: skip
    columns = ["ranks", "call", "sizes", "o, µs", "w, GB/s", "o w, MB", "largest residual"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)


def sentence(c: Collectives) -> Markdown:
    """Whether the line holds, and where it does not."""
    told = []
    for ranks, column, _, found in every(c):
        if column != "ms":
            continue
        bad = found[found["off"].abs() > BAD]
        label = VIEW.looks.of(ranks).label
        if not len(bad):
            told.append(f"for {label} it is within {BAD:.0%} of all {len(found)} times")
            continue
        off = style.between(found["off"], lambda share: style.signed(share, 0))
        told.append(f"for {label} it is off by {off}, by more than {BAD:.0%} at {len(bad)} of "
                    f"{len(found)} sizes")  # fmt: skip
    if not told:
        return Markdown(c.not_yet("sizes enough to fit the line to"))
    text = f"Held against the calls from rest, {'; '.join(told)}."
    return Markdown(" ".join([text, *_shorter(c), *_in_a_row(c)]))


def _shorter(c: Collectives) -> list[str]:
    """Where a message takes longer than one that is four times as long or more: no line has that,
    nor a change of algorithm."""
    told = []
    for ranks, column, _, found in every(c):
        if column != "ms":
            continue
        rows = [c.row(ranks, size) for size in found["size"]]
        # Beyond the spread of both.
        pairs = [(small, large) for small in rows for large in rows
                 if large.size >= 4 * small.size and large.ms_p80 < small.ms_p20]  # fmt: skip
        if pairs:
            small, large = max(pairs, key=lambda pair: pair[0].ms / pair[1].ms)
            told.append(
                f"With {VIEW.looks.of(ranks).label} {megabytes(small.size)} MB take "
                f"{digits(1e3 * small.ms)} µs and {megabytes(large.size)} MB "
                f"{digits(1e3 * large.ms)} µs: the host starts each call from rest and waits for "
                "it, which takes another time from one measurement to the next, and no model of "
                "the link has that."
            )
    return told


def _in_a_row(c: Collectives) -> list[str]:
    """What is left of the residuals where the host runs ahead."""
    told = []
    for ranks, column, line, found in every(c):
        if column == "ms_queued":
            off = style.between(found["off"], lambda share: style.signed(share, 0))
            told.append(
                f"In a row, with {VIEW.looks.of(ranks).label}, the line is off by {off}, and its "
                f"overhead is {digits(1e6 * line.overhead_s)} µs: this line is what the buckets "
                "below are reckoned with."
            )
    return told


def figure(c: Collectives) -> Chart:
    """Times and their lines above, what the lines miss below."""
    made = every(c)
    if not made:
        return panels.empty()
    names = {one[:2]: VIEW.looks.of(one[0]) for one in made}
    for key in names:
        if key[1] == "ms_queued":  # the ranks' own colour, paler; a marker of its own
            alone = names[key]
            names[key] = Look(f"{alone.label}, in a row", PALE.get(alone.colour, "#444444"), "x",
                              short=f"{alone.short}, in a row")  # fmt: skip
    looks = Looks({" ".join(key): look for key, look in names.items()})

    def draw(figure):
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
        for ranks, column, line, found in made:
            look = names[ranks, column]
            above.plot(found["size"], 1e3 * found["s"], color=look.colour, marker=look.marker,
                       markersize=4.6, linestyle="")  # fmt: skip
            drawn = pd.Series([found["size"].min() * 2**k for k in range(40)])
            drawn = drawn[drawn <= found["size"].max()]
            above.plot(drawn, [1e3 * line.time_s(s) for s in drawn], color=look.colour, linewidth=1)
            below.plot(found["size"], 100 * found["off"], color=look.colour, marker=look.marker,
                       markersize=4.6, linewidth=1)  # fmt: skip
        panels.values_axis(above, Measure("ms", base=10))
        panels.doubling_axis(below)  # of both: they share it
        below.axhline(0, color=style.INK, linewidth=0.8)
        below.set(xlabel="bytes of the tensor", ylabel="residual (%)")
        above.set_ylabel("ms")
        panels.legend(figure, panels.handles(list(looks), looks), LEGEND)

    return Chart(draw, height=4.4 + panels.legend_height(len(made), LEGEND))

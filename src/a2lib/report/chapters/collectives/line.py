"""The line of latency and bandwidth: fitted, drawn, and held against the times."""

from __future__ import annotations

import pandas as pd

from a2lib.report import panels, style
from a2lib.report.chapters.collectives.rows import MB, VIEW, Collectives, digits, megabytes
from a2lib.report.metrics import pick
from a2lib.report.panels import Measure
from a2lib.report.style import Chart
from a2lib.report.tables import Markdown, Table
from a2lib.theory.latency import Line, fit

POINTS = 4  # a line through fewer says nothing about its residuals
BAD = 0.1  # a residual beyond this is said to be a failure of the model
LEGEND = 4


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
    return Markdown(f"Held against the calls from rest, {'; '.join(told)}.")


def figure(c: Collectives) -> Chart:
    """Times and their lines above, what the lines miss below."""
    made = [one for one in every(c) if one[1] == "ms"]
    if not made:
        return panels.empty()

    def draw(figure):
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
        for ranks, _, line, found in made:
            look = VIEW.looks.of(ranks)
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
        panels.legend(figure, panels.handles([one[0] for one in made], VIEW.looks), LEGEND)

    return Chart(draw, height=4.4 + panels.legend_height(len(made), LEGEND))

"""Every way to average gradients: the figure and the tables of all steps."""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from a2lib.report import panels, style
from a2lib.report.chapters.ddp.rows import AFTER, MAIN, UPDATING, Ddp, exposed, seen, spread, time
from a2lib.report.style import INK, Chart
from a2lib.report.tables import MISSING, Table

WITHOUT, EXPOSED = "#b5d2f0", "#d55e00"  # of svg.PAIRS
LEVEL = ", level"
TITLES = {False: "launched from Python", True: "replayed from a CUDA graph"}


def figure(c: Ddp, model: str = MAIN) -> Chart:
    """For each way the step without communication, what communication adds to it, and the step's
    spread."""
    shown = {capture: c.of(model, capture).dropna(subset=["ms"]) for capture in TITLES}
    shown = {capture: rows for capture, rows in shown.items() if len(rows)}
    if not shown:
        return panels.empty()
    counts = [len(rows) for rows in shown.values()]

    def draw(figure):
        axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False,
                               height_ratios=counts)[:, 0]  # fmt: skip
        for ax, (capture, rows) in zip(axes, shown.items(), strict=True):
            for y, row in enumerate(rows.itertuples()):
                ax.barh(y, row.ms_without, color=WITHOUT, height=0.7)
                ax.barh(y, exposed(row), left=row.ms_without, color=EXPOSED, height=0.7)
                ends = row.ms_p20, row.ms_p80
                ax.plot(ends, (y, y), color=INK, linewidth=1.3)
                ax.annotate(time(row.ms), (max(row.ms_without, *ends), y), (4, 0), va="center",
                            textcoords="offset points")  # fmt: skip
            ax.set_yticks(range(len(rows)), [short(row) for row in rows.itertuples()])
            ax.invert_yaxis()
            ax.set_xlim(0, 1.15 * max(max(r["ms_p80"].max(), r["ms_without"].max())
                                      for r in shown.values()))  # fmt: skip
            ax.grid(axis="y", visible=False)
            ax.set_title(TITLES[capture])
        axes[-1].set_xlabel("ms a step")
        named = ((WITHOUT, "without communication"), (EXPOSED, "exposed"))
        handles = [Patch(color=color, label=text) for color, text in named]
        handles.append(Line2D([], [], color=INK, linewidth=1.3, label="p20 to p80"))
        panels.legend(figure, handles, columns=3)

    return Chart(draw, height=1.2 + 0.3 * sum(counts) + 0.4 * len(shown))


def short(row) -> str:
    """A way as an axis has room for: 100 MB, copies, bf16."""
    labels = {"naive": "naive", "flat": "flat", "overlapped": "each", "torch_ddp": "PyTorch, ",
              "torch_ddp_view": "PyTorch, views, "}  # fmt: skip
    text = labels.get(row.wrapper, "")
    text += f"{int(row.bucket_mb)} MB" if int(row.bucket_mb) else ""
    text += ", updating" if row.wrapper == UPDATING else ""
    text += ", copies" if row.carrier == "copy_engines" else ""
    return text + (f", {row.sent_dtype}" if row.sent_dtype != "fp32" else "")


def table(c: Ddp, model: str, capture: bool, caption: str, label: str) -> Table:
    """A line for each way: step, exposed, what hides, the host's time, the ranks apart."""
    return Table(frame(c.of(model, capture)), caption, label, left=1, keys=1)


def frame(rows: pd.DataFrame) -> pd.DataFrame:
    lines = []
    for row in rows.itertuples():
        if row.status != "ok":
            lines.append([short(row), style.STATUS.get(row.status, row.status), *[MISSING] * 8])
            continue
        by_rank = (row.ms_rank_min, row.ms_rank_median, row.ms_rank_max)
        lines.append([
            short(row), time(row.ms), spread(row), time(row.ms_without), spread(row, "ms_without"),
            time(exposed(row)) + (LEVEL if not seen(row) else ""), time(row.ms_communication),
            hidden(row), time(row.ms_host), " / ".join(map(time, by_rank)),
        ])  # fmt: skip
    columns = ["gradients", "step, ms", "p20 to p80", "without", "its p20 to p80", "exposed",
               "alone", "hidden", "host", "by rank: least / median / most"]  # fmt: skip
    return pd.DataFrame(lines, columns=columns)


def hidden(row) -> str:
    """The share of the communication that adds nothing to the step, where both are measured, it is
    sent during backward and what it adds is seen: none where the step takes longer than with the
    messages after it."""
    if row.wrapper in AFTER or not seen(row):
        return MISSING
    alone = float(row.ms_communication)
    return f"{min(1.0, max(0.0, 1 - exposed(row) / alone)):.0%}" if alone > 0 else MISSING

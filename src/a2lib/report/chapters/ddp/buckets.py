"""The size of a bucket: the measured sweep beside the handout's formula and the simulation."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator

from a2lib.report import metrics, panels, style
from a2lib.report.chapters.collectives import line
from a2lib.report.chapters.ddp.host import SPREAD
from a2lib.report.chapters.ddp.losses import lost
from a2lib.report.chapters.ddp.rows import (
    BUCKET_MB,
    MAIN,
    MB,
    MODELS,
    NCCL,
    Ddp,
    exposed,
    gradient_bytes,
    seen,
    time,
)
from a2lib.report.chapters.ddp.ways import LEVEL
from a2lib.report.chapters.measured import HOST
from a2lib.report.metrics import pick
from a2lib.report.panels import Measure
from a2lib.report.style import Chart, Look, Looks, listed
from a2lib.report.tables import MISSING, Markdown, Table
from a2lib.theory.buckets import (
    arrivals,
    best_size,
    block_by_block,
    curve,
    fill,
    gradients,
    overhead_s,
    simulate,
)
from a2lib.theory.transformer import SIZES

LOOKS = Looks(
    formula=Look("the formula", "#444444", ""),
    simulated=Look("simulated", "#0072b2", "^"),
    launched=Look("measured, launched", "#d55e00", "o", ours=True),
    captured=Look("measured, captured", "#a86f00", "s", ours=True),
)
# Below this an axis of logarithms shows nothing.
LEAST_MS = 0.5
SIZES_MB = (1, 10, 25, 100, 400, 1000)


def sweep(c: Ddp, capture: bool = False) -> pd.DataFrame:
    """The rows of buckets in fp32 by NCCL, smallest bucket first."""
    rows = pick(c.of(MAIN, capture), wrapper="bucketed", carrier="backend", sent_dtype="fp32")
    return rows.dropna(subset=["ms"]).sort_values("bucket_mb")


def backward_ms(c: Ddp) -> float | None:
    """Of the launched step without communication: the least of the rows, since what differs is
    how long the host held it up."""
    known = c.of(MAIN, False)["ms_backward_without"].dropna()
    return float(known.min()) if len(known) else None


def simulated_ms(c: Ddp, bucket_mb: float) -> float | None:
    """What a simulated backward does not hide: its time as measured, gradients block by block, and
    messages that take what the chapter on collectives has; None until these are measured."""
    backward = backward_ms(c)
    if c.line() is None or backward is None:
        return None
    made, shape = gradients(SIZES[MAIN]), SIZES[MAIN]
    ready = block_by_block(arrivals(made, backward / 1e3), shape.num_layers)
    points = line.points(c.collectives, NCCL, "ms_queued")
    cost = curve(list(points["size"]), list(points["s"]))
    sizes = [4.0 * one.elements for one in made]
    return 1e3 * simulate(sizes, ready, bucket_mb * MB, cost).exposed_s


def formula_ms(c: Ddp, bucket_mb: float) -> float | None:
    """What the formula says of equal buckets of that size."""
    fitted, size = c.line(), gradient_bytes(MAIN)
    count = max(1.0, size / (bucket_mb * MB))
    return None if fitted is None else 1e3 * overhead_s(size, count, fitted)


def verdict(c: Ddp) -> Markdown:
    """Where the formula's assumption fails, and by how much."""
    backward, fitted = backward_ms(c), c.line()
    if backward is None or fitted is None:
        return Markdown(c.not_yet("the sweep beside the formula"))
    sending = 1e3 * gradient_bytes(MAIN) / fitted.bandwidth
    text = (
        f"The formula takes it that sending a bucket's bytes takes as long as computing them. For "
        f"{MODELS[MAIN]} backward takes {time(backward)} ms and the bytes {time(sending)} ms, "
    )
    if sending < backward:
        text += "so the link waits for gradients and hides overheads that the formula counts."
    else:
        text += "so backward ends before the link does, which the formula does not count."
    sizes = [4.0 * one.elements for one in gradients(SIZES[MAIN])]
    text += (
        f" Nor does a bucket cut a gradient: those of {SIZES_MB[0]} MB are "
        f"{len(list(fill(sizes, SIZES_MB[0] * MB)))} messages and not "
        f"{sum(sizes) / (SIZES_MB[0] * MB):.0f}."
    )
    told = []
    for row in sweep(c).itertuples():
        mb = int(row.bucket_mb)
        told.append(f"{mb} MB: {time(formula_ms(c, mb))}, {time(simulated_ms(c, mb))} and "
                    f"{time(exposed(row))} ms" + ("" if seen(row) else " (level)"))  # fmt: skip
    text += (
        f" The formula's best is {time(best_size(gradient_bytes(MAIN), fitted) / MB)} MB"
        f"{_best(c)}. "
        f"By the formula, simulated and measured (launched): {'; '.join(told)}."
    )
    late = [row for row in sweep(c).itertuples() if _by_host(c, row)]
    if late:
        issued = style.between([row.ms_host for row in late], time)
        text += (
            f" At {listed([f'{row.bucket_mb}' for row in late])} MB the launched step waits for "
            f"the host, which takes {issued} ms to issue it and which neither model has"
        )
        above = [row.ms - other.ms for row in late if (other := c.replayed(row)) is not None]
        text += f": the replay takes {style.between(above, time)} ms less." if above else "."
    found = list(sweep(c, capture=True).itertuples())
    if found:
        missed = {row.bucket_mb: exposed(row) - simulated_ms(c, int(row.bucket_mb))
                  for row in found}  # fmt: skip
        best = min(found, key=exposed)
        least = "the least" if len(found) > 1 else "what is measured"
        text += (
            f" Captured, {least} is {time(exposed(best))} ms at {int(best.bucket_mb)} MB where "
            f"{time(simulated_ms(c, int(best.bucket_mb)))} ms are simulated, with the backward of "
            f"a launched step: {style.between(list(missed.values()), time)} ms are missed"
            f"{_from_to(found)}. No host is in that. Neither model has what backward's kernels "
            "lose to messages beside them"
        )
        known = lost(c)
        if known is None or BUCKET_MB not in missed:
            text += ", which is our guess for most of it."
        else:
            whole = known.ms(SIZES[MAIN].num_layers)
            text += (
                f": {time(whole - known.tail_us / 1e3)} ms by {{ref}}`the trace <ddp-lost>` of "
                f"{BUCKET_MB} MB, where {time(missed[BUCKET_MB])} are missed."
            )
        text += _longer_alone(c)
    return Markdown(text)


def _by_host(c: Ddp, row) -> bool:
    """Whether a launched step is seen to wait for the host: by its replay where that has a time."""
    other = c.replayed(row)
    if other is None:
        return row.ms_host >= HOST * row.ms
    return row.ms > (1 + SPREAD) * other.ms


def _from_to(rows: list) -> str:
    sizes = [int(row.bucket_mb) for row in rows]
    return f", from {sizes[0]} to {sizes[-1]} MB" if len(sizes) > 1 else ""


def _longer_alone(c: Ddp) -> str:
    """Where small buckets travel for longer, how much."""
    rows = [row for row in sweep(c).itertuples() if not pd.isna(row.ms_communication)]
    if len(rows) < 2 or rows[0].ms_communication <= rows[-1].ms_communication:
        return ""
    first, last = rows[0], rows[-1]
    return (
        f" Small buckets lose for longer: alone and one after another those of {first.bucket_mb} "
        f"MB travel for {time(first.ms_communication)} ms, those of {last.bucket_mb} MB for "
        f"{time(last.ms_communication)}."
    )


def _best(c: Ddp) -> str:
    """The shortest steps of the sweep, launched and replayed."""
    told = []
    for capture, way in ((False, "launched"), (True, "replayed")):
        rows = list(sweep(c, capture).itertuples())
        if rows:
            best = min(rows, key=lambda row: row.ms)
            text = f"of those {way} the step of {best.bucket_mb} MB is the shortest"
            level = [f"{row.bucket_mb}" for row in rows
                     if row is not best and metrics.level(row, best)]  # fmt: skip
            told.append(text + (f", with those of {listed(level)} MB level" if level else ""))
    return "".join(f"; {one}" for one in told)


def table(c: Ddp, caption: str, label: str) -> Table:
    """By size of bucket: formula, simulation, and both measurements, ms exposed."""
    lines = []
    for mb in SIZES_MB:
        measured = [c.row("bucketed", mb, capture=capture) for capture in (False, True)]
        cells = [formula_ms(c, mb), simulated_ms(c, mb)]
        cells = [None if ms is None else time(ms) for ms in cells]
        cells += [None if row is None else time(exposed(row)) + (LEVEL if not seen(row) else "")
                  for row in measured]  # fmt: skip
        if any(cell is not None for cell in cells):
            lines.append([mb, *(MISSING if cell is None else cell for cell in cells)])
    columns = ["bucket, MB", *(look.label for look in LOOKS.values())]
    return Table(pd.DataFrame(lines, columns=columns), caption, label, left=0, keys=1)


def figure(c: Ddp) -> Chart:
    """Exposed milliseconds against the size of the bucket: formula, simulated, measured with what
    the spreads of step and step without communication leave, and no point where these overlap."""
    points: dict[str, list[tuple[float, float]]] = {}
    if c.line() is not None:
        grid = np.geomspace(SIZES_MB[0], SIZES_MB[-1], 60)
        points["formula"] = [(mb, formula_ms(c, mb)) for mb in grid]
    if simulated_ms(c, 1) is not None:
        points["simulated"] = [(mb, simulated_ms(c, mb)) for mb in SIZES_MB]
    spreads: dict[str, list[tuple[float, float, float]]] = {}
    for capture, label in ((False, "launched"), (True, "captured")):
        rows = list(sweep(c, capture=capture).itertuples())
        if rows:
            points[label] = [(int(r.bucket_mb), exposed(r)) for r in rows if seen(r)]
            spreads[label] = [
                (int(r.bucket_mb), r.ms_p20 - r.ms_without_p80, r.ms_p80 - r.ms_without_p20)
                for r in rows
            ]
    if not points:
        return panels.empty()

    def draw(figure):
        ax = figure.subplots()
        for label, found in points.items():
            look = LOOKS[label]
            x, y = zip(*found, strict=True) if found else ((), ())
            ax.plot(x, [max(ms, LEAST_MS) for ms in y], color=look.colour, marker=look.marker,
                    markersize=4.6, linewidth=2.2 if look.ours else 1.3)  # fmt: skip
            for mb, low, high in spreads.get(label, []):
                ends = [max(ms, LEAST_MS) for ms in (low, high)]
                ax.plot((mb, mb), ends, color=look.colour, linewidth=1.1)
        ax.set_xscale("log")
        ax.set_xticks(SIZES_MB)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
        panels.values_axis(ax, Measure("ms", base=10))
        ax.set(xlabel="bucket (MB)", ylabel="ms exposed", ylim=(LEAST_MS, None))
        panels.legend(figure, panels.handles(list(points), LOOKS), 2)

    return Chart(draw, height=3.1 + panels.legend_height(len(points), 2))

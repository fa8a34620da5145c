"""The notebook's text tables and its figure; not for the book."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from a2lib.experiments.harness.picture import subplots
from a2lib.experiments.harness.sweep import identity
from a2lib.experiments.harness.tables import Table, number, table
from a2lib.experiments.profile.settings import Traced
from a2lib.measure import PROFILE, StoreError, bulk
from a2lib.measure.trace import KINDS

Row = Mapping[str, str]
TIMES = ("ms_timer", "ms_traced", "ms", "ms_busy", "ms_range")
MOST = 12  # kernels that are shown
LETTERS = 80  # of a kernel's name


def tables(rows: Sequence[Row], asked: Sequence[Traced]) -> list[str]:
    """One for each configuration asked for, in it a line for each phase: the timer's time without
    and with the profiler, from the first kernel to the last, with a kernel running, of the host's
    range; how far the host was ahead; kernels; what could not be filed. Below them each note, once.
    """
    known = {identity(PROFILE, row): row for row in rows}
    heads = ["phase", "timer, ms", "traced", "first to last", "busy", "range", "ahead, us"]
    heads += ["kernels", "unfiled, %", ""]
    made, notes, lines = [], Counter(), 0
    for traced in asked:
        found = [known.get(identity(PROFILE, {**traced.key(), "phase": p})) for p in traced.phases]
        body = [_line(row) for row in found if row is not None]
        says = f"{traced}: each phase by the timer, and by what the profiler saw."
        made.append(table(body, heads, says))
        lines += len(body)
        notes.update(r["note"] for r in found if r and r["status"] == "ok" and r["note"])
    said = [f"Noted of {n} of {lines}: {words}" for words, n in notes.items()]
    return [*filter(None, made), "\n".join(said)]


def _line(row: Row) -> list[str]:
    if row["status"] != "ok":
        return [row["phase"], row["status"], *[""] * 7, row["note"]]
    times = [number(float(row[c])) if row[c] else "-" for c in TIMES]
    shares = ("no_launch_percent", "no_range_percent", "no_class_percent")
    unfiled = "/".join(f"{float(row[c]):.2g}" for c in shares)
    queued = number(float(row["us_queued"])) if row["us_queued"] else "-"
    return [row["phase"], *times, queued, row["launches"] or "-", unfiled, ""]


def rows_of(name: str, device: str, traced: Traced, data: Path) -> list[dict]:
    """The rows of a bulk table of a configuration; [] where there is none."""
    if (device, traced.picture) not in bulk.pictures(name, data):
        return []
    try:
        return bulk.read(name, device, traced.picture, data).rows
    except StoreError as error:
        print(error)
        return []


def kernels(traced: Traced | None, rows: Sequence[Mapping[str, object]]) -> Table:
    """The kernels that take the most time, by phase."""
    if traced is None:
        return Table()
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        group = groups.setdefault((row["phase"], row["kind"], row["kernel"]), [0, 0.0, 0.0])
        for i, column in enumerate(("calls", "ms", "share")):
            group[i] += row[column]
    most = sorted(groups.items(), key=lambda item: -item[1][1])[:MOST]
    body = [
        [phase, kind, _cut(kernel), str(calls), number(ms), f"{share:.1%}"]
        for (phase, kind, kernel), (calls, ms, share) in most
    ]
    heads = ["phase", "class", "kernel", "calls", "ms", "of all kernel time"]
    return table(body, heads, f"{traced}: what takes the most time.")


def _cut(kernel: str) -> str:
    return kernel if len(kernel) <= LETTERS else f"{kernel[: LETTERS - 1]}…"


def figure(traced: Traced | None, rows: Sequence[Mapping[str, object]]):
    """Kernel time of each phase by class; None without rows."""
    if traced is None:
        return None
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    drawn, ax = subplots(figsize=(8, 1 + 0.5 * len(phases)))
    left = dict.fromkeys(phases, 0.0)
    for kind in KINDS:
        sums = {p: sum(r["ms"] for r in rows if (r["phase"], r["kind"]) == (p, kind))
                for p in phases}  # fmt: skip
        if any(sums.values()):
            ax.barh(phases, list(sums.values()), left=list(left.values()), label=kind)
            left = {phase: left[phase] + sums[phase] for phase in phases}
    ax.invert_yaxis()
    ax.set(xlabel="kernel time of a step, ms", title=str(traced))
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return drawn

"""What runs beside what around the end of backward: strips of traces, and their overlap in ms."""

from __future__ import annotations

from a2lib.report.chapters import profile
from a2lib.report.chapters.ddp.rows import MAIN, Ddp, time
from a2lib.report.style import Chart, listed
from a2lib.report.tables import Markdown

COMMUNICATION = "communication"
WAYS = {"naive": "sent after backward", "overlapped": "sent during backward"}


def figure(c: Ddp, wrapper: str, model: str = MAIN) -> Chart:
    """Kernels by stream against time, of rank 0's GPU."""
    return profile.strip(c.strip(wrapper, model))


def overlap_us(rows: list[dict]) -> tuple[float, float]:
    """Microseconds in which something is sent, and those of them with other kernels beside."""
    sent = _union(row for row in rows if row["kind"] == COMMUNICATION)
    other = _union(row for row in rows if row["kind"] != COMMUNICATION)
    beside = sum(
        max(0.0, min(end, stop) - max(start, begin)) for start, end in sent for begin, stop in other
    )
    return sum(end - start for start, end in sent), beside


def sentence(c: Ddp, model: str = MAIN) -> Markdown:
    """ddp_overlap_individual_parameters_benchmarking (b), in words."""
    told = []
    for wrapper, words in WAYS.items():
        sent, beside = overlap_us(c.strip(wrapper, model))
        if sent:
            told.append(f"{time(beside / 1e3)} of {time(sent / 1e3)} ms where they are {words}")
    if not told:
        return Markdown(c.not_yet("traces of a step that overlaps and of one that does not"))
    return Markdown(
        f"In the windows drawn, other kernels run beside the messages for {listed(told)}."
    )


def _union(rows) -> list[tuple[float, float]]:
    """The intervals in which at least one of ``rows`` runs, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((r["start_us"], r["start_us"] + r["duration_us"]) for r in rows):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged

"""What runs beside what around the end of backward: strips of traces, and their overlap in ms."""

from __future__ import annotations

from a2lib.report.chapters import profile
from a2lib.report.chapters.ddp.rows import Ddp, time
from a2lib.report.style import Chart, listed
from a2lib.report.tables import Markdown

COMMUNICATION, OPTIMIZER = "communication", "optimizer"
LEAST_US = 100  # what is idle for less is between two kernels
# Wrapper, MB of a bucket, captured, carrier; and what is said of it.
WAYS = {
    ("naive", 0, False, "backend"): "sent after backward",
    ("overlapped", 0, False, "backend"): "sent one by one during backward",
    ("bucketed", 100, False, "backend"): "sent in buckets of 100 MB",
    ("bucketed", 100, True, "backend"): "sent in buckets of 100 MB, replayed",
    ("bucketed", 100, True, "copy_engines"): "sent so by copy engines, their sums included",
}


def figure(c: Ddp, wrapper: str, bucket_mb: int = 0, *, capture: bool = False,
           carrier: str = "backend") -> Chart:  # fmt: skip
    """Kernels by stream against time, of rank 0's GPU."""
    return profile.strip(c.strip(wrapper, bucket_mb, capture=capture, carrier=carrier))


def overlap_us(rows: list[dict]) -> tuple[float, float]:
    """Microseconds in which something is sent, and those of them with other kernels beside."""
    sent = [row for row in rows if row["kind"] == COMMUNICATION]
    other = [row for row in rows if row["kind"] != COMMUNICATION]
    return sum(end - start for start, end in _union(sent)), beside_us(sent, other)


def beside_us(rows: list[dict], others: list[dict]) -> float:
    """Microseconds in which one of ``rows`` and one of ``others`` run."""
    found, other = _union(rows), _union(others)
    return sum(
        max(0.0, min(end, stop) - max(start, begin))
        for start, end in found for begin, stop in other
    )  # fmt: skip


def idle(rows: list[dict]) -> float:
    """The share of the time up to the end of backward's last kernel in which nothing runs."""
    computed = [row for row in rows if row["phase"] == "backward" and row["kind"] != COMMUNICATION]
    end = max(row["start_us"] + row["duration_us"] for row in computed)
    begin = min(row["start_us"] for row in rows)
    busy = sum(max(0.0, min(stop, end) - start) for start, stop in _union(rows))
    return 1 - busy / (end - begin)


def waited_us(rows: list[dict]) -> float | None:
    """Microseconds from the end of backward and its messages to the update in which nothing runs;
    None where the window has no update."""
    update = [row["start_us"] for row in rows if row["kind"] == OPTIMIZER]
    if not update:
        return None
    end = max(row["start_us"] + row["duration_us"] for row in rows if row["phase"] == "backward")
    busy = sum(stop - start for start, stop in _union(rows) if end < start < min(update))
    return max(0.0, min(update) - end - busy)


def sentence(c: Ddp) -> Markdown:
    """ddp_overlap_individual_parameters_benchmarking (b), in words."""
    told, waits, later, none = [], [], [], []
    for (wrapper, mb, capture, carrier), words in WAYS.items():
        rows = c.strip(wrapper, mb, capture=capture, carrier=carrier)
        sent, beside = overlap_us(rows)
        if sent:
            told.append(f"{time(beside / 1e3)} of {time(sent / 1e3)} ms ({beside / sent:.0%}) "
                        f"where they are {words}")  # fmt: skip
            if not capture:
                waits.append(f"{idle(rows):.0%}")
                if (waited := waited_us(rows)) is not None:
                    if waited < LEAST_US:
                        none.append(f"not where they are {words}")
                    else:
                        later.append(f"{time(waited / 1e3)} ms where they are {words}")
    if not told:
        return Markdown(c.not_yet("traces of a step that overlaps and of one that does not"))
    text = f"In the windows drawn, other kernels run beside the messages for {listed(told)}."
    if waits:
        text += (
            f" Until backward ends the GPU of the launched steps, in that order, is idle for "
            f"{listed(waits)} of the time. Where that is much the host is behind, further than "
            "without a profiler: messages that are issued one by one then run while the GPU waits "
            "for its next kernels."
        )
    if later:
        text += (
            f" From the last of them to the update it is idle once more, {listed(later + none)}: "
            "the host has each message to wait for and the update to issue."
        )
    return Markdown(text)


def _union(rows) -> list[tuple[float, float]]:
    """The intervals in which at least one of ``rows`` runs, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((r["start_us"], r["start_us"] + r["duration_us"]) for r in rows):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged

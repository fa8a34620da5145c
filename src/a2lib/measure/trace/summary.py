"""Totals of a table of kernels: by any of its columns, the GPU's idle share, what was not filed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from a2lib.measure.trace.classes import OTHER
from a2lib.measure.trace.kernels import Kernel, covered_ns

COLUMNS = ("name", "kind", "phase", "part", "range", "step", "stream", "device")


@dataclass(frozen=True)
class Total:
    """Kernels of one ``key``: how many, their time, its share of all."""

    key: tuple
    calls: int
    ns: int
    share: float


@dataclass(frozen=True)
class Busy:
    """From the first kernel's start to the last one's end, and how long at least one of a device
    ran; streams overlap, so this is no sum. Several devices add up."""

    span_ns: int
    busy_ns: int


@dataclass(frozen=True)
class Coverage:
    """Shares of kernel time, 0 to 1: launches that were not found, launches outside any range,
    names that no rule knows. And of the latter the longest."""

    no_launch: float
    no_range: float
    no_class: float
    unknown: tuple[str, ...]


def totals(kernels: Iterable[Kernel], *by: str) -> list[Total]:
    """One total for each value of the columns ``by``, most time first.

    A kernel counts once, under its innermost range: totals of ranges do not hold those inside.
    Raises ValueError for another column.
    """
    unknown = [column for column in by if column not in COLUMNS]
    if unknown or not by:
        raise ValueError(f"by {', '.join(unknown) or 'nothing'}: allowed are {', '.join(COLUMNS)}")
    groups: dict[tuple, list[int]] = defaultdict(list)
    for kernel in kernels:
        groups[tuple(getattr(kernel, column) for column in by)].append(kernel.duration_ns)
    everything = sum(map(sum, groups.values())) or 1
    found = [Total(key, len(ns), sum(ns), sum(ns) / everything) for key, ns in groups.items()]
    return sorted(found, key=lambda total: (-total.ns, total.key))


def busy(kernels: Iterable[Kernel]) -> Busy:
    """How much of its time each device worked; nothing for no kernels."""
    devices: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for kernel in kernels:
        devices[kernel.device].append((kernel.start_ns, kernel.end_ns))
    span = sum(max(b for _, b in one) - min(a for a, _ in one) for one in devices.values())
    return Busy(span, sum(map(covered_ns, devices.values())))


def coverage(kernels: list[Kernel]) -> Coverage:
    """What of the time could not be filed."""
    everything = sum(k.duration_ns for k in kernels) or 1

    def share(chosen: Iterable[Kernel]) -> float:
        return sum(k.duration_ns for k in chosen) / everything

    strange = [k for k in kernels if k.kind == OTHER]
    return Coverage(
        share(k for k in kernels if k.launch is None),
        share(k for k in kernels if k.launch is not None and not k.path),
        share(strange),
        tuple(total.key[0] for total in totals(strange, "name")[:5]) if strange else (),
    )

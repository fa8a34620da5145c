"""Of a table of kernels: time by name, how long the GPU worked, what could not be filed."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from a2lib.measure.trace.classes import OTHER
from a2lib.measure.trace.kernels import Kernel, covered_ns


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


def by_name(kernels: Iterable[Kernel]) -> Counter[str]:
    """Nanoseconds of all kernels of a name."""
    found: Counter[str] = Counter()
    for kernel in kernels:
        found[kernel.name] += kernel.duration_ns
    return found


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
    longest = sorted(by_name(strange).items(), key=lambda one: (-one[1], one[0]))
    return Coverage(
        share(k for k in kernels if k.launch is None),
        share(k for k in kernels if k.launch is not None and not k.path),
        share(strange),
        tuple(name for name, _ in longest[:5]),
    )

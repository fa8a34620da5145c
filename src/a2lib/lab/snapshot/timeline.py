"""From allocations to pictures: bytes by category over time, and what was alive at the peak."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from a2lib.lab.snapshot.reading import Allocation, Snapshot
from a2lib.theory.memory.step import CATEGORIES

POINTS = 1500
LARGEST = 20


@dataclass(frozen=True)
class Peak:
    """The moment of most bytes: in which phase, and the allocations that were alive."""

    phase: str
    alive: tuple[Allocation, ...]

    @property
    def total(self) -> int:
        return sum(one.bytes for one in self.alive)


def timeline_rows(
    snapshot: Snapshot, points: int = POINTS, phase: str | None = None
) -> list[dict[str, object]]:
    """The bytes of each of ``CATEGORIES`` over time as rows of the bulk table ``memory``: at most
    ``points`` (4 at least) in order of time, counted from the first event, the true peak among
    them; of all, or of the phases of one name.

    Events are cut into bins of equal number, of which the first, the least, the most and the last
    state is kept. Raises ValueError for fewer points than 4 and as ``peak``.
    """
    if points < 4:
        raise ValueError(f"points is {points}; allowed are whole numbers of at least 4")
    states, start = _inside(snapshot, phase), _start(snapshot)
    size = max(1, math.ceil(len(states) / (points // 4)))
    rows = []
    for first in range(0, len(states), size):
        bin_ = states[first : first + size]
        totals = [sum(state.bytes) for state in bin_]
        chosen = {0, len(bin_) - 1, totals.index(min(totals)), totals.index(max(totals))}
        for state in (bin_[i] for i in sorted(chosen)):
            row = {"time_us": round(state.time_us - start)}
            row["phase"] = snapshot.phase_at(state.time_us)
            rows.append(row | dict(zip(CATEGORIES, state.bytes, strict=True)))
    return rows


def peak(snapshot: Snapshot, phase: str | None = None) -> Peak:
    """The moment of most bytes, in all or in the phases of one name; the first of equals.

    "forward" are all those of that name, "step 0/forward" is one of them, "step 0" all of it.
    Raises ValueError, naming those there are, for a phase that was not recorded.
    """
    most = max(_inside(snapshot, phase), key=lambda state: sum(state.bytes))
    alive = tuple(a for a in snapshot.allocations if a.first <= most.number < a.last)
    return Peak(snapshot.phase_at(most.time_us), alive)


def largest_rows(found: Peak, n: int = LARGEST) -> list[dict[str, object]]:
    """The n largest allocations at a peak, largest first, earlier ones before equals, as rows of
    the bulk table ``largest``."""
    largest = sorted(found.alive, key=lambda one: (-one.bytes, one.start_us))[:n]
    columns = ("bytes", "category", "phase", "name", "line")
    return [
        {"rank": rank, **{column: getattr(one, column) for column in columns}}
        for rank, one in enumerate(largest, start=1)
    ]


def line_rows(snapshot: Snapshot, phase: str, n: int = LARGEST) -> list[dict[str, object]]:
    """The n largest of what the phases of that name (and those inside them) asked for, as rows of
    the bulk table ``lines``: equal sizes of one line of code, category and phase in one row. Where
    backward's thread has no line, what saved it or owns it tells them apart, blocks taken together.
    """
    found: Counter[tuple] = Counter()
    for one in snapshot.allocations:
        if f"/{phase}/" in f"/{one.phase}/":
            inner = one.phase.rpartition("/")[2]
            name = re.sub(r"\b\d+\b", "*", one.name)
            found[one.bytes, one.category, inner, name, one.line] += 1
    rows = sorted(found.items(), key=lambda item: (-item[0][0], -item[1], item[0][2:]))
    columns = ("bytes", "count", "category", "phase", "name", "line")
    return [
        dict(zip(columns, (size, count, *where), strict=True)) for (size, *where), count in rows[:n]
    ]


def _start(snapshot: Snapshot) -> float:
    times = [one.start_us for one in snapshot.allocations if one.start_us > -math.inf]
    times += [one.end_us for one in snapshot.allocations if one.end_us < math.inf]
    return min(times, default=0.0)


class _State(NamedTuple):
    """Bytes by category after the event ``number``; -1 before all."""

    number: int
    time_us: float
    bytes: tuple[int, ...]


def _states(snapshot: Snapshot) -> list[_State]:
    now, changes = dict.fromkeys(CATEGORIES, 0), []
    for one in snapshot.allocations:
        if one.first < 0:
            now[one.category] += one.bytes
        else:
            changes.append((one.first, one.start_us, one.category, one.bytes))
        if one.last < math.inf:
            changes.append((int(one.last), one.end_us, one.category, -one.bytes))
    states = [_State(-1, _start(snapshot), tuple(now.values()))]
    for number, time_us, category, change in sorted(changes):
        now[category] += change
        states.append(_State(number, time_us, tuple(now.values())))
    return states


def _inside(snapshot: Snapshot, phase: str | None) -> list[_State]:
    """The states of the phases of that name, or all; with what was there when one began."""
    states = _states(snapshot)
    if phase is None:
        return states
    chosen = [p for p in snapshot.phases if f"/{p.name}".endswith(f"/{phase}")]
    if not chosen:
        there = ", ".join(dict.fromkeys(p.name for p in snapshot.phases)) or "none, in this file"
        raise ValueError(f"phase {phase!r}: allowed are {there}")
    found = []
    for p in chosen:
        before = [state for state in states if state.time_us < p.start_us][-1:]
        found += [state._replace(time_us=p.start_us) for state in before]
        found += [state for state in states if p.start_us <= state.time_us <= p.end_us]
    return found

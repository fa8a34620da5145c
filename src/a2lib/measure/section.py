"""What a section is: one table of ``data/measured``, and what is said of it beside its columns.

``a2lib.measure.sections`` is the registry of them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from a2lib.measure.columns import COLUMNS, NUMBER, TRUTH, WHOLE

STATUSES = ("ok", "oom", "unsupported", "error")

# status: one of STATUSES. ms, ms_p20, ms_p80: median and quantiles of n samples in milliseconds,
# blank unless status is ok. run: the row of runs.csv that produced this one.
COMMON = ("status", "ms", "ms_p20", "ms_p80", "n", "run")
TIMES = ("ms", "ms_p20", "ms_p80")

INTEGERS = frozenset(name for name, column in COLUMNS.items() if column.kind == WHOLE)
FLAGS = frozenset(name for name, column in COLUMNS.items() if column.kind == TRUTH)
# Results beside the time: a number where there is one, blank where there is none.
RESULTS = frozenset(name for name, column in COLUMNS.items() if column.kind == NUMBER) - {*TIMES}


@dataclass(frozen=True)
class Section:
    """One table: ``key`` identifies a row, ``values`` are section-specific results.

    ``columns`` is the header of its files, in order. Where it is not ``timed``, an ``ok`` row needs
    no ``ms``, but one of its values. A section may gain values: files without them stay readable.

    ``handler`` is "module:function", what a worker calls to measure it; ``notebook`` the name of
    the notebook that does; ``pages`` those of the book about it, the chapter first.
    """

    name: str
    key: tuple[str, ...]
    values: tuple[str, ...] = ()
    timed: bool = True
    handler: str = ""
    notebook: str = ""
    pages: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return self.key + self.values + COMMON

    def table(self) -> dict[str, object]:
        """What a worker needs to store rows, for JSON; ``table_of`` is the way back."""
        return {"name": self.name, "key": self.key, "values": self.values, "timed": self.timed}


def table_of(given: Mapping[str, object]) -> Section:
    """The section whose ``table()`` came through JSON."""
    lists = {name: tuple(given[name]) for name in ("key", "values")}
    return Section(**{**given, **lists})

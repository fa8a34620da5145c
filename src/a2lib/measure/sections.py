"""The tables of ``data/measured``: which columns each section of the report measures.

A section is one folder of CSV files, one file per device. The key columns say what was measured,
the value columns what came of it beside the time, and the common columns are the same in all.
"""

from __future__ import annotations

from dataclasses import dataclass

STATUSES = ("ok", "oom", "unsupported", "error")

# status: one of STATUSES. ms, ms_p20, ms_p80: median and quantiles of n samples in milliseconds,
# blank unless status is ok. run: the row of runs.csv that produced this one.
COMMON = ("status", "ms", "ms_p20", "ms_p80", "n", "run")

# A column name means the same in every section, so its kind is given once.
INTEGERS = frozenset({"batch", "heads", "seq_len", "head_dim", "size", "peak_bytes", "n"})
FLAGS = frozenset({"causal"})
TIMES = ("ms", "ms_p20", "ms_p80")


@dataclass(frozen=True)
class Section:
    """One table: ``key`` identifies a row, ``values`` are section-specific results.

    ``columns`` is the header of its files, in order.
    """

    name: str
    key: tuple[str, ...]
    values: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return self.key + self.values + COMMON


# pass: forward, backward or end_to_end; peak_bytes: memory above what was allocated at entry.
FLASH = Section(
    "flash",
    ("implementation", "dtype", "batch", "heads", "seq_len", "head_dim", "causal", "pass"),
    ("peak_bytes", "note"),
)

# operation: matmul (size x size times size x size) or copy (size bytes read, as many written).
CEILING = Section("ceiling", ("operation", "dtype", "size"), ("note",))

SECTIONS = {section.name: section for section in (FLASH, CEILING)}

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
INTEGERS = frozenset(
    {"batch", "heads", "seq_len", "head_dim", "size", "second", "score_scale", "peak_bytes"}
    | {"sm_mhz", "n"}
)
FLAGS = frozenset({"causal"})
TIMES = ("ms", "ms_p20", "ms_p80")
# Results beside the time: a number where there is one, blank where there is none.
RESULTS = frozenset({"ms_graph", "ms_host", "ms_mean", "power_w", "error", "error_max"})


@dataclass(frozen=True)
class Section:
    """One table: ``key`` identifies a row, ``values`` are section-specific results.

    ``columns`` is the header of its files, in order. Where it is not ``timed``, an ``ok`` row needs
    no ``ms``, but one of its values. A section may gain values: files without them stay readable.
    """

    name: str
    key: tuple[str, ...]
    values: tuple[str, ...] = ()
    timed: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        return self.key + self.values + COMMON


_SHAPE = ("dtype", "batch", "heads", "seq_len", "head_dim", "causal")

# pass: forward, backward or end_to_end. peak_bytes: memory above what was allocated at entry.
# ms_graph: the same call replayed from a CUDA graph, the GPU's own time; ms_host: the host's to
# issue it. sm_mhz: the clock of the multiprocessors while timing.
FLASH = Section(
    "flash",
    ("implementation", *_SHAPE, "pass"),
    ("peak_bytes", "ms_graph", "ms_host", "sm_mhz", "note"),
)

# protocol: burst, sustained or board; second: since its start, where it is followed over time.
FLASH_PROTOCOL = Section(
    "flash_protocol",
    ("protocol", "implementation", *_SHAPE, "pass", "second"),
    ("ms_mean", "sm_mhz", "power_w", "note"),
)

# tensor: o, dq, dk or dv; score_scale: what q was multiplied by. error: relative Frobenius norm of
# the difference from float64; error_max: largest difference over the largest true magnitude.
FLASH_ACCURACY = Section(
    "flash_accuracy",
    ("implementation", *_SHAPE, "score_scale", "tensor"),
    ("error", "error_max", "note"),
    timed=False,
)

# operation: matmul (size x size times size x size) or copy (size bytes read, as many written).
CEILING = Section("ceiling", ("operation", "dtype", "size"), ("sm_mhz", "note"))

SECTIONS = {s.name: s for s in (FLASH, FLASH_PROTOCOL, FLASH_ACCURACY, CEILING)}

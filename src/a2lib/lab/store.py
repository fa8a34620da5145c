"""The result store: one tidy CSV file per section and device under ``data/measured``.

    store = Store(FLASH, device_slug())
    store.check_writable()                     # before measuring, not after
    store.put({**key, "status": "ok", "ms": 1.25, "n": 80, "run": run})
    store.rows()

A row is on disk when ``put`` returns, and measuring again replaces that row alone.
"""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from a2lib.lab.runs import read_runs, runs_table, scrub
from a2lib.lab.sections import FLAGS, INTEGERS, RESULTS, SECTIONS, STATUSES, TIMES, Section
from a2lib.lab.table import Row, StoreError, Table, check_device, clean, measured

__all__ = ["Store", "StoreError", "read_section"]

# Six digits are far finer than the spread of any timing, and keep float32 noise out of the files.
_FORMAT = ".6g"
_NEVER_BLANK = INTEGERS | FLAGS  # in a key
# What a column of each kind may hold; pandas holds no longer a number.
_WHOLE = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}(\.\d+)?(e[-+]?\d\d)?", re.ASCII)


class Store(Table):
    """The rows of ``section`` measured on ``device``, in ``data`` (default ``paths.data_dir()``).

    ``section`` is a Section or its name, ``device`` a slug as ``device_slug()`` gives it.
    """

    def __init__(self, section: Section | str, device: str, data: Path | None = None) -> None:
        check_device(device)
        self.section, self.device = _section(section), device
        folder = measured(data)
        self.data = folder.parent
        super().__init__(
            folder / self.section.name / f"{device}.csv",
            self.section.columns,
            self.section.key,
            later=self.section.values,
        )
        self._runs = runs_table(self.data)

    def to_text(self, row: Mapping[str, object]) -> Row:
        """Values are text, numbers, booleans or None (stored blank). Columns left out are blank,
        but the key, ``status`` and ``run``, which is to be in runs.csv, are required."""
        columns, required = self.section.columns, (*self.section.key, "status", "run")
        wrong = [f"unknown column {name}" for name in row if name not in columns]
        wrong += [f"column {name} is missing" for name in required if name not in row]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}; the columns are {', '.join(columns)}")
        text = {c: format_value(c, row.get(c)) for c in columns}
        if text["run"] and self._runs.find((text["run"],)) is None:
            raise ValueError(f"run {text['run']!r} is not in runs.csv; take it from start_run")
        return text

    def check(self, row: Row) -> None:
        section = self.section
        if row["status"] not in STATUSES:
            raise ValueError(f"status is {row['status']!r}; allowed are {', '.join(STATUSES)}")
        for column in (section.key[0], "run"):
            if not row[column]:
                raise ValueError(f"{column} is blank")
        for column, text in row.items():
            if not text and not (column in section.key and column in _NEVER_BLANK):
                continue
            if column in INTEGERS and not _WHOLE.fullmatch(text):
                raise ValueError(f"{column} is {text[:40]!r}, not a whole number below 10^18")
            if (column in RESULTS or column in TIMES) and not _NUMBER.fullmatch(text):
                raise ValueError(f"{column} is {text[:40]!r}, not a number of at least 0")
            if column in FLAGS and text not in ("true", "false"):
                raise ValueError(f"{column} is {text[:40]!r}; allowed are true, false")
        results = [c for c in section.values if c in RESULTS]
        given = [c for c in (*TIMES, "n", *results) if row[c]]
        if row["status"] != "ok":
            if given:
                raise ValueError(f"{given[0]} is given, but status is {row['status']}, not ok")
            return
        results = results or [c for c in section.values if c != "note"]
        needed = ["ms"] if section.timed else results
        if not any(row[c] for c in needed):
            raise ValueError(f"status is ok, but {', '.join(needed)} is blank")
        for column in given:
            if (column == "n" or column.split("_")[0] == "ms") and not float(row[column]):
                raise ValueError(f"status is ok, but {column} is {row[column]}")
        low, ms, high = (row[c] or row["ms"] for c in ("ms_p20", "ms", "ms_p80"))
        if ms and not float(low) <= float(ms) <= float(high):
            raise ValueError(f"ms {ms} is not between ms_p20 {low} and ms_p80 {high}")

    def check_writable(self) -> None:
        self._runs.check_writable()
        super().check_writable()


# A page asks for the same rows many times; a table notices itself that its file has changed.
_reader = lru_cache(maxsize=64)(Store)


def read_section(name: Section | str, data: Path | None = None) -> dict[str, list[Row]]:
    """Device slug -> rows of that section, of every device measured in ``data``; {} for none.

    Raises StoreError for an unknown section, a broken file, or a row whose run is not in runs.csv:
    a figure without its run is not published.
    """
    section, folder = _section(name), measured(data)
    runs = {run["run"] for run in read_runs(folder.parent)}
    found: dict[str, list[Row]] = {}
    for path in sorted((folder / section.name).glob("[!.]*.csv")):
        found[path.stem] = _reader(section, path.stem, folder.parent).rows()
        for line, row in enumerate(found[path.stem], start=2):
            if row["run"] not in runs:
                raise StoreError(f"{path}:{line}: run {row['run']!r} is not in runs.csv")
    return found


def format_value(column: str, value: object) -> str:
    """``value`` as the text stored in ``column``; raises ValueError for what cannot be stored."""
    if hasattr(value, "item"):  # numpy and 0-d tensor scalars
        value = value.item()
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return clean(scrub(value))
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"{column} is {value!r}; allowed are text, finite numbers, true, false")
    if column in TIMES or column in RESULTS:
        return repr(float(format(value, _FORMAT)))
    return str(int(value)) if value.is_integer() else repr(value)


def _section(section: Section | str) -> Section:
    if isinstance(section, Section):
        return section
    if section not in SECTIONS:
        raise StoreError(f"section {section!r}: allowed are {', '.join(SECTIONS)}")
    return SECTIONS[section]

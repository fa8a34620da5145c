"""The result store: one tidy CSV file per section and device under ``data/measured``.

    store = Store(FLASH, device_slug())
    store.check_writable()                     # before measuring, not after
    if store.get(key) is None:
        store.put({**key, "status": "ok", "ms": 1.25, "n": 80, "run": run})

A row is on disk when ``put`` returns, and measuring again replaces that row alone.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from a2lib import paths
from a2lib.measure.device import check_slug
from a2lib.measure.runs import read_runs, runs_table, scrub
from a2lib.measure.sections import (
    FLAGS,
    INTEGERS,
    RESULTS,
    SECTIONS,
    STATUSES,
    TIMES,
    Section,
)
from a2lib.measure.table import NUMBER, Row, StoreError, Table, clean, to_line

__all__ = ["Store", "StoreError", "read_section"]

# Six digits are far finer than the spread of any timing, and keep float32 noise out of the files.
_FORMAT = ".6g"
LARGEST = 2**63 - 1  # that pandas holds


class Store:
    """The rows of ``section`` measured on ``device``, in ``data`` (default ``paths.data_dir()``).

    ``section`` is a Section or its name, ``device`` a slug as ``device_slug()`` gives it.
    """

    def __init__(self, section: Section | str, device: str, data: Path | None = None) -> None:
        self.section = _section(section)
        try:
            check_slug(device)
        except ValueError as error:
            raise StoreError(str(error)) from None
        self.device = device
        self.data = Path(data).absolute() if data is not None else paths.data_dir()
        self._table = Table(
            self.data / "measured" / self.section.name / f"{device}.csv",
            self.section.columns,
            self.section.key,
            lambda row: check_row(self.section, row),
            later=self.section.values,
        )
        self._runs = runs_table(self.data)

    @property
    def path(self) -> Path:
        return self._table.path

    def rows(self) -> list[Row]:
        """All rows in the order of the file, which ``put`` sorts by key; every value as text.

        Raises StoreError naming file and line for a broken file.
        """
        return self._table.rows()

    def get(self, key: Mapping[str, object]) -> Row | None:
        """The row whose key columns equal those of ``key``, or None.

        Raises StoreError where a key column is missing or a column unknown.
        """
        try:
            self._check_names(key, required=self.section.key)
            return self._table.get(tuple(format_value(c, key[c]) for c in self.section.key))
        except ValueError as error:
            raise StoreError(f"{self.path}: {error}") from error

    def put(self, row: Mapping[str, object]) -> None:
        """Store ``row``, replacing the row of the same key alone; on disk when this returns.

        Values are text, numbers, booleans or None (stored blank). Columns left out are blank, but
        the key, ``status`` and ``run`` are required, and ``ms`` where status is ok (in a section
        that is not timed: one of its values). Raises
        StoreError, with the row in the message, if it is not valid, its run is not in runs.csv or
        the disk refuses it.
        """
        text: Row = {}
        try:
            self._check_names(row, required=(*self.section.key, "status", "run"))
            text = {c: format_value(c, row.get(c)) for c in self.section.columns}
            if text["run"] and self._runs.get((text["run"],)) is None:
                raise ValueError(f"run {text['run']!r} is not in runs.csv; take it from start_run")
        except (ValueError, StoreError) as error:
            where = "" if isinstance(error, StoreError) else f"{self.path}: "
            # What cannot be put into columns is given by name.
            kept = to_line(text.values()) if text else clean(str(dict(row)))
            raise StoreError(f"{where}{error}; the row not stored: {kept}") from error
        self._table.put(text)

    def check_writable(self) -> None:
        """Raise StoreError now if a later ``put`` would fail: a broken file, a read-only folder or
        a full disk."""
        self._runs.check_writable()
        self._table.check_writable()

    def _check_names(self, row: Mapping[str, object], required: tuple[str, ...]) -> None:
        allowed = ", ".join(self.section.columns)
        unknown = sorted(str(name) for name in row if name not in self.section.columns)
        if unknown:
            raise ValueError(f"unknown column {', '.join(unknown)}; allowed are {allowed}")
        missing = [name for name in required if name not in row]
        if missing:
            raise ValueError(f"column {', '.join(missing)} is missing; the columns are {allowed}")


# A page asks for the same rows many times; a table notices itself that its file has changed.
_reader = lru_cache(maxsize=64)(Store)


def read_section(name: Section | str, data: Path | None = None) -> dict[str, list[Row]]:
    """Device slug -> rows of that section, of every device measured in ``data``; {} for none.

    Raises StoreError for an unknown section, a broken file, or a row whose run is not in runs.csv:
    a figure without its run is not published.
    """
    section = _section(name)
    data = Path(data).absolute() if data is not None else paths.data_dir()
    runs = {run["run"] for run in read_runs(data)}
    measured: dict[str, list[Row]] = {}
    for path in sorted((data / "measured" / section.name).glob("[!.]*.csv")):
        rows = _reader(section, path.stem, data).rows()
        for line, row in enumerate(rows, start=2):
            if row["run"] not in runs:
                raise StoreError(f"{path}:{line}: run {row['run']!r} is not in runs.csv")
        measured[path.stem] = rows
    return measured


def format_value(column: str, value: object) -> str:
    """``value`` as the text stored in ``column``; raises ValueError for what cannot be stored."""
    if hasattr(value, "item"):  # numpy and 0-d tensor scalars
        value = value.item()
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return clean(scrub(value))
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{column} is {number}, not a finite number")
        if column in TIMES or column in RESULTS:
            return repr(float(format(number, _FORMAT)))
        return str(int(number)) if number.is_integer() else repr(number)
    kind = type(value).__name__
    raise ValueError(f"{column} is a {kind}; allowed are text, numbers, booleans and None")


def check_row(section: Section, row: Row) -> None:
    """Raise ValueError, saying what is allowed, unless ``row`` is a valid row of ``section``."""
    if row["status"] not in STATUSES:
        raise ValueError(f"status is {row['status']!r}; allowed are {', '.join(STATUSES)}")
    if not row["run"]:
        raise ValueError("run is blank; take it from start_run()")
    for column, text in row.items():
        if column == section.key[0] and not text:
            raise ValueError(f"{column} is blank, and a row is known by it")
        if column in INTEGERS and (text or column in section.key):
            if not (text.isascii() and text.isdigit() and text == (text.lstrip("0") or "0")):
                raise ValueError(f"{column} is {text!r}, not a whole number")
            if len(text) > len(str(LARGEST)) or int(text) > LARGEST:
                raise ValueError(f"{column} is {text[:40]}, more than the largest, {LARGEST}")
        elif column in FLAGS and text not in ("true", "false"):
            raise ValueError(f"{column} is {text!r}; allowed are true, false")
        elif column in RESULTS and text:
            if not (NUMBER.fullmatch(text) and 0 <= float(text) < math.inf):
                raise ValueError(f"{column} is {text!r}, not a number of at least 0")
    results = [column for column in section.values if column in RESULTS]
    if row["status"] != "ok":
        measured = [column for column in (*TIMES, "n", *results) if row[column]]
        if measured:
            raise ValueError(f"{measured[0]} is given, but status is {row['status']}, not ok")
        return
    needed = results or [column for column in section.values if column != "note"]
    if not section.timed and not any(row[column] for column in needed):
        raise ValueError(f"status is ok but {', '.join(needed)} are blank")
    for column in (*TIMES, *(c for c in results if c.startswith("ms_"))):
        text = row[column]
        if not text and not (column == "ms" and section.timed):
            continue
        if not (NUMBER.fullmatch(text) and 0 < float(text) < math.inf):
            raise ValueError(f"status is ok but {column} is {text!r}, not a positive number")
    if row["n"] == "0":
        raise ValueError("n is 0, but status is ok")
    if row["ms"]:
        low, high = row["ms_p20"] or row["ms"], row["ms_p80"] or row["ms"]
        if not float(low) <= float(row["ms"]) <= float(high):
            raise ValueError(f"ms {row['ms']} is not between ms_p20 {low} and ms_p80 {high}")


def _section(section: Section | str) -> Section:
    if isinstance(section, Section):
        return section
    if section not in SECTIONS:
        raise StoreError(f"section {section!r}: allowed are {', '.join(SECTIONS)}")
    return SECTIONS[section]

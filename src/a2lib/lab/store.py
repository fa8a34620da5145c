"""The measured rows: one tidy CSV file per table and device under ``data/measured``.

    table = Table("ddp")    # one of sections.toml, its rows of this machine's GPU
    table = Table("mine", key="sort size", values="swaps")    # one of the reader's own
    table.put({"sort": "quick", "size": 1024, "status": "ok", "ms": 1.25, "run": run})
    table.frame()                              # a pandas DataFrame

A row is on disk when ``put`` returns, and measuring again replaces that row alone.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from a2lib import paths
from a2lib.errors import none_of
from a2lib.lab import bulk
from a2lib.lab.csv_file import CsvFile, Row, StoreError, clean, measured
from a2lib.lab.device import device_slug
from a2lib.lab.runs import read_runs, scrub
from a2lib.lab.sections import (
    FLAGS,
    INTEGERS,
    RESULTS,
    SECTIONS,
    STATUSES,
    TIMES,
    Section,
    section_of,
)

if TYPE_CHECKING:
    import pandas

__all__ = ["PUBLISHED", "StoreError", "Table", "data_folder", "read_section"]

# Six digits are far finer than the spread of any timing, and keep float32 noise out of the files.
_FORMAT = ".6g"
# The device whose rows are committed for every table, and which the book's pages speak of.
PUBLISHED = "nvidia-h200"
# What a column may hold, by pattern and in words.
_ALLOWED = {
    **dict.fromkeys(INTEGERS, (re.compile(r"\d{1,18}", re.ASCII), "a whole number")),
    **dict.fromkeys(
        (*RESULTS, *TIMES),
        (re.compile(r"\d{1,18}(\.\d+)?(e[-+]?\d\d)?", re.ASCII), "a number of at least 0"),
    ),
    **dict.fromkeys(FLAGS, (re.compile("true|false"), "true or false")),
}


class Table(CsvFile):
    """The rows of one table measured on one device.

    Arguments:

    - ``section`` is the name of a table, or a Section. The published tables are those of
      ``sections.toml``. Another name makes a table of your own, and needs ``key``.
    - ``device`` is a name as ``device_slug()`` returns it, such as "nvidia-h200" (default: this
      machine's GPU, or "cpu").
    - ``data`` is the folder of the rows (default: ``data_folder``).
    - ``key`` has the columns that say what was measured, and ``values`` those of the results beside
      ``ms``. Both are words with spaces between them.

    Raises StoreError for an unknown name without ``key``, and for a published one with another key.
    """

    def __init__(
        self,
        section: Section | str,
        device: str | None = None,
        data: Path | None = None,
        *,
        key: str = "",
        values: str = "",
    ) -> None:
        device = device_slug() if device is None else device
        self.section, self.device = _section(section, key, values), device
        self.run = ""  # in a worker that of the sweep
        folder = measured(data_folder(device) if data is None else data)
        self.data = folder.parent
        path = folder / self.section.name / f"{device}.csv"
        super().__init__(path, self.section.columns, self.section.key)

    def __reduce__(self):
        """Return what makes the same table in a worker's process, which reads the file itself."""
        return Table, (self.section, self.device, self.data)

    def identify(self, row: Mapping[str, object]) -> tuple[str, ...]:
        """Return the key of ``row`` as stored; raises StoreError where a column is missing."""
        missing = [column for column in self.key if column not in row]
        if missing:
            columns = ", ".join(self.key)
            raise StoreError(
                f"{dict(row)} lacks {', '.join(missing)}; the key columns are {columns}"
            )
        return tuple([format_value(column, row[column]) for column in self.key])

    def frame(self, keys: Iterable[Mapping[str, object]] | None = None) -> pandas.DataFrame:
        """Return the rows as a DataFrame, numbers as numbers; only those with ``keys``, in their
        order, where keys are given."""
        import pandas as pd

        rows = self.rows()
        if keys is not None:
            stored = dict(zip(map(self.identify, rows), rows, strict=True))
            wanted = dict.fromkeys(map(self.identify, keys))
            rows = [stored[key] for key in wanted if key in stored]
        frame = pd.DataFrame(rows, columns=list(self.columns))
        for column in frame:
            frame[column] = _typed(column, frame[column])
        return frame

    def shown(self, keys: Iterable[Mapping[str, object]] | None = None) -> pandas.DataFrame:
        """Return the rows that a notebook shows: those with ``keys``; if none of these is stored,
        every row of this device; if there is none either, the published rows of ``PUBLISHED``.
        Print which ones, unless they are the first."""
        frame = self.frame(keys)
        if len(frame):
            return frame
        everything = self.frame()
        if len(everything):
            print(f"{self.section.name}: no row asked for is stored; shown are all stored rows.")
            return everything
        published = Table(self.section, PUBLISHED, paths.ROOT / "data")
        if published.rows():
            print(
                f"{self.section.name}: no row is stored for {self.device}; shown are the"
                f" published rows of {PUBLISHED}."
            )
        return published.frame()

    def put_picture(
        self,
        bulk_table: str,
        name: str,
        rows: Iterable[Mapping[str, object]],
        about: Mapping[str, object],
    ) -> None:
        """Store what a picture is drawn from beside this table, as ``bulk.put`` does: in a worker,
        which has the run."""
        bulk.put(bulk_table, self.device, name, rows, run=self.run, about=about, data=self.data)

    def to_text(self, row: Mapping[str, object]) -> Row:
        """Values are text, numbers, booleans or None (stored blank). Columns left out are blank,
        but the key, ``status`` and ``run`` are required."""
        columns = self.section.columns
        for name in row:
            if name not in columns:
                raise ValueError(f"unknown column {name}; the columns are {', '.join(columns)}")
        for name in (*self.section.key, "status", "run"):
            if name not in row:
                raise ValueError(f"column {name} is missing; the columns are {', '.join(columns)}")
        return {column: format_value(column, row.get(column)) for column in columns}

    def check(self, row: Row) -> None:
        section = self.section
        if row["status"] not in STATUSES:
            raise ValueError(f"status is {row['status']!r}; allowed are {', '.join(STATUSES)}")
        if not row["run"] or not row[section.key[0]]:
            raise ValueError(f"{section.key[0]} or run is blank")
        for column, text in row.items():
            allowed = _ALLOWED.get(column)
            if text and allowed and not allowed[0].fullmatch(text):
                raise ValueError(f"{column} is {text!r}, not {allowed[1]}")
        needed = ("ms",) if section.timed else ("ms", *section.values)
        given = [column for column in needed if row[column] and column != "note"]
        if row["status"] == "ok" and not given:
            raise ValueError(f"status is ok, but {', '.join(needed)} is blank")
        for column in (*TIMES, "n", *RESULTS):
            if row["status"] != "ok" and row.get(column):
                raise ValueError(f"{column} is given, but status is {row['status']}")


def data_folder(device: str) -> Path:
    """Return where rows of ``device`` go: $A2LIB_DATA if set, else data/ for a GPU.

    Those of "cpu" go to build/data, which the report reads too: data/ is committed, and a trial of
    a notebook leaves it as it was. Raises StoreError where the package was installed as a copy,
    beside which nothing is kept.
    """
    if not (paths.ROOT / "notebooks").is_dir():
        raise StoreError(
            "a2lib is installed without its repository, where rows and compiled code are kept:"
            " in a clone run `pip install -e '.[book]'`, then this again"
        )
    if device == "cpu" and not os.environ.get("A2LIB_DATA"):
        return paths.build_dir() / "data"
    return paths.data_dir()


# A page asks for the same rows many times; a table notices itself that its file has changed.
_reader = lru_cache(maxsize=64)(Table)


def read_section(name: Section | str, data: Path | None = None) -> dict[str, list[Row]]:
    """Device slug -> rows of that section, of every device measured in ``data``; {} for none.

    Raises StoreError for an unknown section, a broken file, or a row whose run is not in runs.csv:
    a figure without its run is not published.
    """
    section, folder = _section(name), measured(data)
    runs = {run["run"] for run in read_runs(folder.parent)}
    rows_of: dict[str, list[Row]] = {}
    for path in sorted((folder / section.name).glob("[!.]*.csv")):
        rows_of[path.stem] = _reader(section, path.stem, folder.parent).rows()
        for line, row in enumerate(rows_of[path.stem], start=2):
            if row["run"] not in runs:
                raise StoreError(f"{path}:{line}: run {row['run']!r} is not in runs.csv")
    return rows_of


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


def _section(section: Section | str, key: str = "", values: str = "") -> Section:
    if isinstance(section, Section):
        return section
    registered = SECTIONS.get(section)
    if registered is None:
        if not key:
            raise StoreError(
                f"table {none_of(SECTIONS, section)}; or give a new one its key columns: key='...'"
            )
        return section_of(section, key, f"{values} note", timed=False)
    if key and tuple(key.split()) != registered.key:
        columns = " ".join(registered.key)
        raise StoreError(f"table {section!r} has the key {columns!r}, not {key!r}")
    return registered


def _typed(column: str, cells: pandas.Series) -> pandas.Series:
    import pandas as pd

    if column in TIMES or column in RESULTS or column in INTEGERS:
        return pd.to_numeric(cells, errors="coerce")
    if set(cells) <= {"true", "false"} and len(cells):
        return cells == "true"
    numbers = pd.to_numeric(cells, errors="coerce")
    numeric = (numbers.notna() | (cells == "")).all() and numbers.notna().any()
    return numbers if numeric else cells

"""Bulk tables: what a picture is drawn from, a thousand rows of one configuration.

    put("memory", "nvidia-h200", "2.7B-128-train-step", timeline_rows(recording), run=run,
        about={"model": "2.7B", "context": 128})
    read("memory", "nvidia-h200", "2.7B-128-train-step").rows

A picture is one file, ``measured/bulk/<table>/<device>/<picture>.csv``: a first line that says in
JSON which run measured it and what of, then a table in CSV. It is replaced whole, in one rename,
and small enough to commit.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from a2lib.lab.csv_file import StoreError, clean, locked, measured, to_csv, write
from a2lib.lab.runs import scrub
from a2lib.lab.sections import BULK

_KINDS = {"int": int, "float": float, "": str}


def _columns(text: str) -> dict[str, type]:
    """Return the columns of a table with their kinds; one without a kind is text."""
    columns = {}
    for entry in text.split(", "):
        column, _, kind = entry.partition(":")
        columns[column] = _KINDS[kind]
    return columns


# Table -> column -> int, float or str.
TABLES = {table: _columns(text) for table, text in BULK.items()}


@dataclass(frozen=True)
class Picture:
    """The rows of one picture, numbers as numbers; the run that measured it; what it is of."""

    run: str
    about: dict
    rows: list[dict[str, object]]


def put(
    table: str,
    device: str,
    picture: str,
    rows: Iterable[Mapping[str, object]],
    *,
    run: str,
    about: Mapping[str, object],
    data: Path | None = None,
) -> Path:
    """Write a picture in place of the one of its name, on disk when this returns; its path.

    Floats keep six digits. Raises StoreError, in one line, for other columns than the table's, for
    what is no number, and for a disk that refuses.
    """
    path = _folder(table, data) / device / f"{picture}.csv"
    columns = TABLES[table]
    lines: list[list[str]] = [list(columns)]
    for row in rows:
        if row.keys() != columns.keys():
            raise StoreError(f"{path}: a row of {', '.join(row)}; columns are {', '.join(columns)}")
        line = []
        for column, kind in columns.items():
            try:
                line.append(_text(row[column], kind))
            except (ValueError, TypeError) as error:
                raise StoreError(f"{path}: {error}; the row not stored: {row}") from None
        lines.append(line)
    head = scrub(json.dumps({"run": run, "about": dict(about)}, sort_keys=True))
    with locked(path):
        write(path, f"# {head}\n{to_csv(lines)}")
    return path


def read(table: str, device: str, picture: str, data: Path | None = None) -> Picture:
    """Return the picture of that name."""
    rows = []
    path = _folder(table, data) / device / f"{picture}.csv"
    with open(path, newline="", encoding="utf-8") as file:
        head = json.loads(file.readline().removeprefix("# "))
        for line in csv.DictReader(file, strict=True):
            row = {}
            for column, kind in TABLES[table].items():
                row[column] = kind(line[column])
            rows.append(row)
    return Picture(head["run"], head["about"], rows)


def pictures(table: str, data: Path | None = None) -> list[tuple[str, str]]:
    """Return (device, picture) of every picture of a table."""
    every = []
    for path in _folder(table, data).glob("*/[!.]*.csv"):
        every.append((path.parent.name, path.stem))
    return sorted(every)


def _folder(table: str, data: Path | None) -> Path:
    if table not in TABLES:
        raise StoreError(f"table {table!r}: allowed are {', '.join(TABLES)}")
    return measured(data) / "bulk" / table


def _text(value: object, kind: type) -> str:
    if kind is str:
        return clean(scrub(str(value)))
    if not math.isfinite(value) or kind(value) != value:
        raise ValueError(f"{value!r} is no {'whole' if kind is int else 'finite'} number")
    return str(int(value)) if kind is int else f"{float(value):.6g}"

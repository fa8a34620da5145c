"""Bulk tables: what a picture is drawn from, a thousand rows of one configuration.

    put("memory", "nvidia-h200", "2.7B-128-train-step", timeline_rows(snapshot), run=run,
        about={"model": "2.7B", "context": 128})
    read("memory", "nvidia-h200", "2.7B-128-train-step").rows

A picture is one file, ``measured/bulk/<table>/<device>/<picture>.csv``: a first line that says in
JSON which run measured it and what of, then a table in CSV. It is replaced whole, in one rename,
and small enough to commit.
"""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from a2lib.lab.csv_file import StoreError, broken, clean, locked, measured, named, to_csv, write
from a2lib.lab.runs import scrub
from a2lib.lab.sections import BULK

MOST_ROWS = 2000
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

    Floats keep six digits. Raises StoreError, in one line, for an unknown table, no row or more
    than ``MOST_ROWS``, other columns, or a disk that refuses.
    """
    path = _place(table, device, picture, data)
    columns = TABLES[table]
    lines: list[list[str]] = []
    for row in rows:
        if set(row) != set(columns):
            raise StoreError(f"{path}: a row of {', '.join(row)}; columns are {', '.join(columns)}")
        lines.append([_text(row[column], kind) for column, kind in columns.items()])
    if not 1 <= len(lines) <= MOST_ROWS:
        raise StoreError(f"{path}: {len(lines)} rows; allowed are 1 to {MOST_ROWS}")
    head = scrub(json.dumps({"run": run, "about": dict(about)}, sort_keys=True))
    with locked(path):
        write(path, f"# {head}\n{to_csv([columns, *lines])}")
    return path


def read(table: str, device: str, picture: str, data: Path | None = None) -> Picture:
    """The picture of that name.

    Raises StoreError, naming the file, where there is none or it is broken.
    """
    path = _place(table, device, picture, data)
    columns = TABLES[table]
    if not path.is_file():
        there = [name for of_device, name in pictures(table, data) if of_device == device]
        raise StoreError(f"{path}: no such picture; there are {', '.join(there) or 'none'}")
    rows = []
    with named(path), open(path, encoding="utf-8", newline="") as file:
        lines = csv.reader(file, strict=True)
        try:
            head = json.loads(file.readline().removeprefix("# "))
            run, about = head["run"], head["about"]
            if next(lines, None) != list(columns):
                raise ValueError(f"the columns are {', '.join(columns)}")
            for fields in lines:
                cells = zip(columns.items(), fields, strict=True)
                rows.append({column: kind(field) for (column, kind), field in cells})
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise broken(path, 1 + lines.line_num, error) from None
    return Picture(run, about, rows)


def pictures(table: str, data: Path | None = None) -> list[tuple[str, str]]:
    """(device, picture) of every picture of a table."""
    return sorted((p.parent.name, p.stem) for p in _folder(table, data).glob("*/[!.]*.csv"))


def _folder(table: str, data: Path | None) -> Path:
    if table not in TABLES:
        raise StoreError(f"table {table!r}: allowed are {', '.join(TABLES)}")
    return measured(data) / "bulk" / table


def _place(table: str, device: str, picture: str, data: Path | None) -> Path:
    return _folder(table, data) / device / f"{picture}.csv"


def _text(value: object, kind: type) -> str:
    if kind is str:
        return clean(scrub(str(value)))
    return str(int(value)) if kind is int else f"{float(value):.6g}"

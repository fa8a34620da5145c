"""Bulk tables: what a picture is drawn from, a thousand rows of one configuration.

    put("memory", "nvidia-h200", "2.7B-128-train-step", timeline_rows(snapshot), run=run,
        about={"model": "2.7B", "context": 128})
    read("memory", "nvidia-h200", "2.7B-128-train-step").rows

A picture is one file, ``measured/bulk/<table>/<device>/<picture>.csv``: a first line that says in
JSON which run measured it and what of, then a table in CSV. It is replaced whole, in one rename,
and small enough to commit.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from a2lib.lab.csv_file import (
    StoreError,
    broken,
    clean,
    lines_of,
    locked,
    measured,
    named,
    to_csv,
    write,
)
from a2lib.lab.runs import runs_table, scrub
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
    than ``MOST_ROWS``, other columns or kinds, a run that is not in runs.csv, or a disk that
    refuses.
    """
    path, columns = _place(table, device, picture, data), TABLES[table]
    rows = list(rows)
    if not 1 <= len(rows) <= MOST_ROWS:
        raise StoreError(f"{path}: {len(rows)} rows; allowed are 1 to {MOST_ROWS}")
    if runs_table(data).find((run,)) is None:
        raise StoreError(f"{path}: run {run!r} is not in runs.csv; take it from start_run")
    lines: list[Iterable[str]] = [columns]
    for number, row in enumerate(rows, start=1):
        try:
            if set(row) != set(columns):
                raise ValueError(f"has {', '.join(row)}; the columns are {', '.join(columns)}")
            lines.append([_text(c, row[c], kind) for c, kind in columns.items()])
        except ValueError as error:
            raise StoreError(f"{path}: row {number}: {error}") from None
    head = scrub(json.dumps({"run": run, "about": dict(about)}, sort_keys=True))
    with locked(path):
        write(path, f"# {head}\n{to_csv(lines)}")
    return path


def read(table: str, device: str, picture: str, data: Path | None = None) -> Picture:
    """The picture of that name.

    Raises StoreError, naming file and line, where there is none or it is broken.
    """
    path, columns = _place(table, device, picture, data), TABLES[table]
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("[!.]*.csv"))) or "none"
        raise StoreError(f"{path}: no such picture; there are {there}")
    with named(path), open(path, encoding="utf-8") as file:
        head = file.readline()
    rows = []
    number = 1
    try:
        said = json.loads(head.removeprefix("# "))
        run, about = str(said["run"]), dict(said["about"])
        for number, fields in lines_of(path, skip=1):
            if number > 2:
                cells = zip(columns.items(), fields, strict=True)
                rows.append({column: kind(field) for (column, kind), field in cells})
            elif fields != list(columns):
                raise ValueError(f"the columns are {', '.join(columns)}")
    except (ValueError, KeyError, TypeError) as error:
        raise broken(path, number, error) from None
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


def _text(column: str, value: object, kind: type) -> str:
    if kind is str:
        return clean(scrub(str(value)))
    if not isinstance(value, int | float) or not math.isfinite(value) or kind(value) != value:
        raise ValueError(f"{column} is {value!r}, no {'whole' if kind is int else 'finite'} number")
    return str(int(value)) if kind is int else f"{float(value):.6g}"

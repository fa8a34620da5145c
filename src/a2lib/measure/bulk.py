"""Bulk tables: what a picture is drawn from, a thousand rows of one configuration.

    put("memory", "nvidia-h200", "2.7B-128-train-step", timeline_rows(snapshot), run=run,
        about={"model": "2.7B", "context": 128})
    read("memory", "nvidia-h200", "2.7B-128-train-step").rows

A picture is one file, ``measured/bulk/<table>/<device>/<picture>.csv``: a first line that says in
JSON which run measured it and what of, then a table in CSV. It is replaced whole, in one rename,
and small enough to commit.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from a2lib import paths
from a2lib.measure.device import check_slug
from a2lib.measure.runs import runs_table, scrub
from a2lib.measure.snapshot.reading import CATEGORIES
from a2lib.measure.table import StoreError, clean, to_line

MOST_ROWS = 2000
FOLDER = "bulk"
# Table -> column -> int, float or str. What makes the rows is named first.
TABLES: dict[str, dict[str, type]] = {
    # a2lib.measure.trace.strip_rows: a window of a step, times in microseconds from its start.
    "strip": {"start_us": float, "duration_us": float, "stream": str, "kind": str, "phase": str,
              "part": str},
    # kernel_rows: all kernels of the steps of a trace.
    "kernels": {"phase": str, "part": str, "kind": str, "kernel": str, "calls": int, "ms": float,
                "median_us": float, "share": float},
    # a2lib.measure.snapshot.timeline_rows: bytes by category.
    "memory": {"time_us": int, "phase": str, **dict.fromkeys(CATEGORIES, int)},
    # largest_rows: the largest allocations at the peak.
    "largest": {"rank": int, "bytes": int, "category": str, "phase": str, "name": str, "line": str},
    # line_rows: the largest that a phase asked for, once for each line of code.
    "lines": {"bytes": int, "count": int, "category": str, "phase": str, "name": str, "line": str},
    # a2lib.experiments.fsdp.gathers: each all-gather and the wait for it, from a step's begin.
    "gathers": {"unit": str, "pass": str, "gather_start_ms": float, "gather_end_ms": float,
                "turn_ms": float, "compute_start_ms": float, "compute_end_ms": float,
                "slack_ms": float, "waited_ms": float},
    # a2lib.measure.saved.saved_rows: what one module keeps for its backward.
    "saved": {"number": int, "module": str, "operations": str, "shape": str, "dtype": str,
              "bytes": int},
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class Picture:
    """The rows of one picture, numbers as numbers; the run that measured it; what it is of."""

    run: str
    about: dict
    rows: list[dict[str, object]]


def put(table: str, device: str, picture: str, rows: Iterable[Mapping[str, object]], *, run: str,
        about: Mapping[str, object], data: Path | None = None) -> Path:  # fmt: skip
    """Write a picture in place of the one of its name, on disk when this returns; its path.

    Floats keep six digits. Raises StoreError, in one line, for an unknown table, a name that is
    none (letters, digits, ``._-``), no row or more than ``MOST_ROWS``, other columns or kinds, a
    run that is not in runs.csv, or a disk that refuses.
    """
    path, columns = _place(table, device, picture, data), TABLES[table]
    rows = list(rows)
    if not 1 <= len(rows) <= MOST_ROWS:
        raise StoreError(f"{path}: {len(rows)} rows; allowed are 1 to {MOST_ROWS}")
    if runs_table(_data(data)).get((run,)) is None:
        raise StoreError(f"{path}: run {run!r} is not in runs.csv; take it from start_run")
    lines = [to_line(columns)]
    for number, row in enumerate(rows, start=1):
        if set(row) != set(columns):
            raise StoreError(f"{path}: row {number} has {', '.join(map(str, row))}; the columns "
                             f"are {', '.join(columns)}")  # fmt: skip
        try:
            lines.append(to_line(_text(row[c], kind, c) for c, kind in columns.items()))
        except ValueError as error:
            raise StoreError(f"{path}: row {number}: {error}") from None
    head = json.dumps({"run": run, "about": dict(about)}, sort_keys=True)
    content = "\n".join([f"# {scrub(head)}", *lines, ""])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    return path


def read(table: str, device: str, picture: str, data: Path | None = None) -> Picture:
    """The picture of that name.

    Raises StoreError, naming file and line, where there is none or it is broken.
    """
    path, columns = _place(table, device, picture, data), TABLES[table]
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        there = ", ".join(sorted(p.stem for p in path.parent.glob("[!.]*.csv"))) or "none"
        raise StoreError(f"{path}: no such picture; there are {there}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: {clean(str(error))}") from None
    head, *lines = text.split("\n")
    try:
        said = json.loads(head.removeprefix("# "))
        run, about = str(said["run"]), dict(said["about"])
    except (ValueError, KeyError, TypeError):
        raise StoreError(f"{path}:1: no line of the run and what it measured") from None
    if not lines or lines[0] != to_line(columns):
        raise StoreError(f"{path}:2: the columns are {', '.join(columns)}")
    if lines[-1]:
        raise StoreError(f"{path}:{len(lines) + 1}: cut short: the line has no end")
    rows = []
    for number, fields in enumerate(csv.reader(lines[1:-1]), start=3):
        try:
            named = zip(columns.items(), fields, strict=True)
            rows.append({c: kind(field) for (c, kind), field in named})
        except ValueError as error:
            raise StoreError(f"{path}:{number}: {error}") from None
    return Picture(run, about, rows)


def pictures(table: str, data: Path | None = None) -> list[tuple[str, str]]:
    """(device, picture) of every picture of a table."""
    _columns(table)
    folder = _data(data) / "measured" / FOLDER / table
    return sorted((path.parent.name, path.stem) for path in folder.glob("*/[!.]*.csv"))


def _data(data: Path | None) -> Path:
    return Path(data).absolute() if data is not None else paths.data_dir()


def _columns(table: str) -> dict[str, type]:
    if table not in TABLES:
        raise StoreError(f"table {table!r}: allowed are {', '.join(TABLES)}")
    return TABLES[table]


def _place(table: str, device: str, picture: str, data: Path | None) -> Path:
    _columns(table)
    if not _NAME.fullmatch(picture):
        raise StoreError(f"picture {picture!r}: allowed are letters, digits and ._- in a name")
    try:
        check_slug(device)
    except ValueError as error:
        raise StoreError(str(error)) from None
    return _data(data) / "measured" / FOLDER / table / device / f"{picture}.csv"


def _text(value: object, kind: type, column: str) -> str:
    if kind is str:
        return clean(scrub(str(value)))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{column} is {value!r}, no number")
    if kind is int:
        if value != int(value):
            raise ValueError(f"{column} is {value!r}, no whole number")
        return str(int(value))
    return f"{float(value):.6g}"

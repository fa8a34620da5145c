"""Measured and published rows as typed tables; no row without the run that made it."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd

from a2lib.measure.runs import read_runs
from a2lib.measure.sections import FLAGS, INTEGERS, RESULTS, SECTIONS, TIMES
from a2lib.measure.store import read_section
from a2lib.paths import ROOT, build_dir, data_dir

PUBLISHED = "nvidia-h200"  # the device whose figures are committed and written about
# A clock is a whole number that is averaged; `value` is of the reference tables alone.
FLOATS = frozenset({*TIMES, *RESULTS, "sm_mhz", "value"})
# What every chapter may ask of data/reference/devices.csv.
DEVICES = ("quantity", "value", "unit", "address")


class ReportError(RuntimeError):
    """Published figures that cannot be shown: the message names the file, the line, the reason."""


def data_roots() -> list[Path]:
    """Folders the report reads: the data folder, then what `make book` measured here.

    With A2LIB_DATA set, that folder alone: whoever moves the data means exactly that data.
    """
    here = build_dir() / "data"
    if os.environ.get("A2LIB_DATA") or not here.is_dir():
        return [data_dir()]
    return [data_dir(), here]


def section_file(root: Path, section: str, device: str) -> Path:
    """The CSV of one section and device, as the result store names it."""
    return root / "measured" / section / f"{device}.csv"


def load(section: str, roots: list[Path] | None = None) -> pd.DataFrame:
    """Every measured row of a section, from every root and device.

    Returns the section's columns, numbers and truth values as such, with `device`, `file`
    (its CSV) and `local` (True unless it is the published device in the first root) added. No file
    gives an empty table of the same columns.

    Raises StoreError, naming file and line, where a row is not valid or its run is not in runs.csv:
    no figure is published without its run.
    """
    roots = data_roots() if roots is None else roots
    frames = []
    for position, root in enumerate(roots):
        for device, rows in read_section(section, data=root).items():
            frame = _typed(pd.DataFrame(rows, columns=list(SECTIONS[section].columns)))
            local = device != PUBLISHED or position > 0
            file = str(section_file(root, section, device))
            frames.append(frame.assign(device=device, file=file, local=local))
    frames = [frame for frame in frames if len(frame)]
    if not frames:
        columns = [*SECTIONS[section].columns, "device", "file", "local"]
        return _typed(pd.DataFrame(columns=columns)).astype({"local": bool})
    return pd.concat(frames, ignore_index=True)


def load_runs(roots: list[Path] | None = None) -> pd.DataFrame:
    """runs.csv of every root, one row per run, indexed by the run's id."""
    roots = data_roots() if roots is None else roots
    rows = [run for root in roots for run in read_runs(data=root)]
    if not rows:
        return pd.DataFrame(columns=["run", "started", "device"]).set_index("run")
    return pd.DataFrame(rows).drop_duplicates("run").set_index("run")


def load_devices(root: Path | None = None) -> pd.DataFrame:
    """What the makers state of their devices: data/reference/devices.csv."""
    return load_reference("devices", root, DEVICES)


def load_reference(name: str, root: Path | None = None,
                   needs: tuple[str, ...] = (),
                   numbers: tuple[str, ...] = ()) -> pd.DataFrame:  # fmt: skip
    """Published figures of other people: data/reference/<name>.csv, each row with its source.

    They belong to the project, not to a machine, so A2LIB_DATA does not move them. `needs` are the
    columns that the reader asks of them, beside device and source; `numbers` those that hold
    numbers and that no measured table has.

    Raises:
        ReportError: no table, or not all its columns; a row without a source or a device, of
            another length than the header, or with a value that is no number.
    """
    file = (root or ROOT / "data") / "reference" / f"{name}.csv"
    try:
        header, *lines = csv.reader(file.read_text(encoding="utf-8").splitlines(), strict=True)
    except (ValueError, csv.Error) as error:
        raise ReportError(f"{file}: not a table of UTF-8 text: {error}") from None
    missing = [c for c in needs if c not in header]
    if missing:
        raise ReportError(f"{file}:1: column {', '.join(missing)} is missing")
    rows = []
    for line, fields in enumerate(lines, start=2):
        if len(fields) != len(header):
            raise ReportError(f"{file}:{line}: {len(fields)} fields, not {len(header)}")
        rows.append(dict(zip(header, fields, strict=True)))
    for line, row in enumerate(rows, start=2):
        if not (row.get("source") and row.get("device")):
            raise ReportError(f"{file}:{line}: a published figure needs its source and its device")
    try:
        return _typed(pd.DataFrame(rows), numbers)
    except (ValueError, TypeError, OverflowError):
        raise ReportError(_unreadable(file, rows, numbers)) from None


def _typed(frame: pd.DataFrame, numbers: tuple[str, ...] = ()) -> pd.DataFrame:
    floats, columns = FLOATS | set(numbers), {}
    for column in frame:
        if column in floats:
            columns[column] = _floats(list(frame[column]))
        elif column in INTEGERS:
            columns[column] = _integers(list(frame[column]))
        elif column in FLAGS:
            columns[column] = np.array([cell == "true" for cell in frame[column]], dtype=bool)
        else:
            columns[column] = frame[column]
    return pd.DataFrame(columns, index=frame.index)


# A pass of Python over the cells, since pandas' own conversions cost more than reading the file.
def _floats(cells: list) -> np.ndarray:
    return np.array([math.nan if c is None or c == "" else _number(c, float) for c in cells])


def _integers(cells: list) -> pd.api.extensions.ExtensionArray:
    blank = np.array([c is None or c == "" for c in cells], dtype=bool)
    whole = [0 if b else _number(c, int) for c, b in zip(cells, blank, strict=True)]
    return pd.arrays.IntegerArray(np.array(whole, dtype="int64"), blank)


def _number(cell, kind: type):
    if isinstance(cell, str) and "_" in cell:  # Python reads 1_000
        raise ValueError(f"{cell!r} is no number")
    return kind(cell)


def _unreadable(file: Path, rows: list[dict], numbers: tuple[str, ...]) -> str:
    """Where the first value is that `_typed` cannot read."""
    for line, row in enumerate(rows, start=2):
        for column, text in row.items():
            try:
                _typed(pd.DataFrame([{column: text}]), numbers)
            except (ValueError, TypeError, OverflowError):
                return f"{file}:{line}: {column} is {str(text)[:40]!r}, not its kind of number"
    return f"{file}: not a table of numbers"

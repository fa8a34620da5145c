"""Measured and published rows as typed tables; no row without the run that made it."""

import os
from functools import cache
from pathlib import Path

import pandas as pd

from a2lib.lab.runs import COLUMNS, read_runs
from a2lib.lab.sections import FLAGS, INTEGERS, RESULTS, SECTIONS, TIMES
from a2lib.lab.store import PUBLISHED, read_section
from a2lib.paths import ROOT, build_dir, data_dir

# A clock is a whole number that is averaged; `value` is of the reference tables alone.
FLOATS = frozenset({*TIMES, *RESULTS, "sm_mhz", "value"})


class ReportError(RuntimeError):
    """Published figures that cannot be shown; the message names file, line and reason."""


def data_roots() -> list[Path]:
    """Return the folders that the report reads: the data folder, then what `make book` measured.

    With A2LIB_DATA set this is that folder alone: whoever moves the data means exactly that data.
    """
    here = build_dir() / "data"
    if os.environ.get("A2LIB_DATA") or not here.is_dir():
        return [data_dir()]
    return [data_dir(), here]


def load(section: str, roots: list[Path] | None = None) -> pd.DataFrame:
    """Return every measured row of a section, from every root and device.

    The columns are the section's, with numbers and truth values typed, and three more: `device`,
    `file` (the row's CSV) and `local` (False only for the published device in the first root).
    Without any file the table is empty and has the same columns.

    Raises StoreError, naming file and line, where a row is not valid or its run is not in runs.csv:
    no figure is published without its run.
    """
    roots = data_roots() if roots is None else roots
    frames = []
    for position, root in enumerate(roots):
        for device, rows in read_section(section, data=root).items():
            if not rows:
                continue
            frame = _typed(pd.DataFrame(rows, columns=list(SECTIONS[section].columns)))
            local = device != PUBLISHED or position > 0
            file = str(root / "measured" / section / f"{device}.csv")
            frames.append(frame.assign(device=device, file=file, local=local))
    if not frames:
        columns = [*SECTIONS[section].columns, "device", "file", "local"]
        return _typed(pd.DataFrame(columns=columns)).astype({"local": bool})
    return pd.concat(frames, ignore_index=True)


def load_runs(roots: list[Path] | None = None) -> pd.DataFrame:
    """Return runs.csv of every root, a row per run, indexed by the run's id."""
    roots = data_roots() if roots is None else roots
    rows = []
    for root in roots:
        rows += read_runs(data=root)
    return pd.DataFrame(rows, columns=list(COLUMNS)).drop_duplicates("run").set_index("run")


@cache  # a page asks for a device's sheet a hundred times
def load_devices() -> pd.DataFrame:
    """Return the devices' data sheets, data/reference/devices.csv; callers must not change it."""
    return load_reference("devices")


def load_reference(
    name: str, root: Path | None = None, numbers: tuple[str, ...] = ()
) -> pd.DataFrame:
    """Return figures that others published, data/reference/NAME.csv; each row has its source.

    They belong to the project, not to a machine, so A2LIB_DATA does not move them. `numbers` are
    the columns that hold numbers and that no measured table has.

    Raises ReportError, naming the file, if it is no table, if a row lacks its source or its device,
    and if a value that must be a number is none.
    """
    file = (root or ROOT / "data") / "reference" / f"{name}.csv"
    try:
        rows = pd.read_csv(file, dtype=str, keep_default_na=False)
        incomplete = (rows["source"] == "") | (rows["device"] == "")
        if incomplete.any():
            line = incomplete.to_numpy().argmax() + 2  # the head is line 1
            raise ReportError(f"{file}:{line}: a published figure needs its source and its device")
        return _typed(rows, numbers)
    except (ValueError, KeyError) as error:
        raise ReportError(f"{file}: {error}") from None


def _typed(frame: pd.DataFrame, numbers: tuple[str, ...] = ()) -> pd.DataFrame:
    """Return a frame of strings with the columns of flags and of numbers typed."""
    floats = FLOATS | set(numbers)
    typed = {}
    for column, cells in frame.items():
        if column in FLAGS:
            typed[column] = cells == "true"
        elif column in floats:
            typed[column] = _numbers(column, cells).astype(float)
        elif column in INTEGERS:
            typed[column] = _numbers(column, cells).astype("Int64")
    return frame.assign(**typed)


def _numbers(column: str, cells: pd.Series) -> pd.Series:
    """Return cells as numbers, blank ones as missing; raises ValueError, naming the column."""
    try:
        return pd.to_numeric(cells.where(cells != ""))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{column}: {error}") from None

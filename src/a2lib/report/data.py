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
    """Published figures that cannot be shown: the message names the file, the line, the reason."""


def data_roots() -> list[Path]:
    """Folders the report reads: the data folder, then what `make book` measured here.

    With A2LIB_DATA set, that folder alone: whoever moves the data means exactly that data.
    """
    here = build_dir() / "data"
    if os.environ.get("A2LIB_DATA") or not here.is_dir():
        return [data_dir()]
    return [data_dir(), here]


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
            file = str(root / "measured" / section / f"{device}.csv")
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
    return pd.DataFrame(rows, columns=list(COLUMNS)).drop_duplicates("run").set_index("run")


@cache  # a page asks for a device's sheet a hundred times
def load_devices() -> pd.DataFrame:
    """What the makers state of their devices: data/reference/devices.csv. Not to be changed."""
    return load_reference("devices")


def load_reference(
    name: str, root: Path | None = None, numbers: tuple[str, ...] = ()
) -> pd.DataFrame:
    """Published figures of other people: data/reference/<name>.csv, each row with its source.

    They belong to the project, not to a machine, so A2LIB_DATA does not move them. `numbers` are
    the columns that hold numbers and that no measured table has.

    Raises ReportError, naming the file, for what is no table, for a row without a source or a
    device, and for a value that is no number where one belongs.
    """
    file = (root or ROOT / "data") / "reference" / f"{name}.csv"
    try:
        rows = pd.read_csv(file, dtype=str, keep_default_na=False)
        nameless = ((rows["source"] == "") | (rows["device"] == "")).to_numpy().nonzero()[0]
        if len(nameless):
            line = nameless[0] + 2
            raise ReportError(f"{file}:{line}: a published figure needs its source and its device")
        return _typed(rows, numbers)
    except (ValueError, KeyError) as error:
        raise ReportError(f"{file}: {error}") from None


def _typed(frame: pd.DataFrame, numbers: tuple[str, ...] = ()) -> pd.DataFrame:
    floats, typed = FLOATS | set(numbers), {}
    for column, cells in frame.items():
        if column in FLAGS:
            typed[column] = cells == "true"
        elif column in floats or column in INTEGERS:
            try:
                known = pd.to_numeric(cells.where(cells != ""))
                typed[column] = known.astype(float if column in floats else "Int64")
            except (ValueError, TypeError) as error:
                raise ValueError(f"{column}: {error}") from None
    return frame.assign(**typed)

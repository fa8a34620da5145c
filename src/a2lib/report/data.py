"""Measured and published rows as typed tables; no row without the run that made it."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pandas as pd

from a2lib.measure.runs import read_runs
from a2lib.measure.sections import FLAGS, FLASH, INTEGERS, RESULTS, SECTIONS, TIMES
from a2lib.measure.store import read_section
from a2lib.paths import ROOT, build_dir, data_dir

PUBLISHED = "nvidia-h200"  # the device whose figures are committed and written about
# Columns of the reference tables alone, and whole numbers that are drawn or averaged.
_FLOATS = ("speedup_over_eager", "value", "sm_mhz", "score_scale", "before_mib", "peak_mib")
FLOATS = frozenset({*TIMES, *RESULTS, *_FLOATS})
# What the report asks of the tables in data/reference.
REFERENCE = {
    "flash": (*FLASH.key, "status", "ms", "speedup_over_eager", "title", "address"),
    "devices": ("quantity", "value", "unit", "address"),
}


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


def load_reference(name: str, root: Path | None = None) -> pd.DataFrame:
    """Published figures of other people: data/reference/<name>.csv, each row with its source.

    They belong to the project, not to a machine, so A2LIB_DATA does not move them.

    Raises:
        ReportError: no table, or not all its columns; a row without a source or a device, of
            another length than the header, or with a value that is no number.
    """
    file = (root or ROOT / "data") / "reference" / f"{name}.csv"
    try:
        header, *lines = csv.reader(file.read_text(encoding="utf-8").splitlines(), strict=True)
    except (ValueError, csv.Error) as error:
        raise ReportError(f"{file}: not a table of UTF-8 text: {error}") from None
    missing = [c for c in REFERENCE.get(name, ()) if c not in header]
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
        return _typed(pd.DataFrame(rows))
    except (ValueError, TypeError, OverflowError):
        raise ReportError(_unreadable(file, rows)) from None


def handout(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the handout's sweep: batch 1, one head, causal."""
    return rows[(rows["batch"] == 1) & (rows["heads"] == 1) & rows["causal"]]


def leaderboard(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the 2025 leaderboard shape: 16 heads of 64, 16,384 tokens, causal, bf16."""
    return rows[
        (rows["batch"] == 1) & (rows["heads"] == 16) & (rows["head_dim"] == 64)
        & (rows["seq_len"] == 16384) & rows["causal"] & (rows["dtype"] == "bf16")
    ]  # fmt: skip


def paper(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the FlashAttention-3 paper's shapes: 16,384 tokens in all, hidden size 2048, bf16."""
    return rows[
        (rows["batch"] * rows["seq_len"] == 16384) & (rows["heads"] * rows["head_dim"] == 2048)
        & (rows["dtype"] == "bf16")
    ]  # fmt: skip


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame.copy()
    for column in [c for c in frame if c in INTEGERS or c in FLOATS]:
        cells = frame[column].astype("object").where(lambda cell: cell != "", None)
        frame[column] = pd.to_numeric(cells).astype("float64" if column in FLOATS else "Int64")
    for column in [c for c in FLAGS if c in frame]:
        frame[column] = (frame[column].astype("object") == "true").astype(bool)
    return frame


def _unreadable(file: Path, rows: list[dict]) -> str:
    """Where the first value is that `_typed` cannot read."""
    for line, row in enumerate(rows, start=2):
        for column, text in row.items():
            try:
                _typed(pd.DataFrame([{column: text}]))
            except (ValueError, TypeError, OverflowError):
                return f"{file}:{line}: {column} is {str(text)[:40]!r}, not its kind of number"
    return f"{file}: not a table of numbers"


def runs_file(section_csv: str) -> str:
    """The runs.csv that belongs to a section's CSV."""
    return str(Path(section_csv).parents[1] / "runs.csv")

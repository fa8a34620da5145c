"""Where rows come from: texts and tables that name their runs, versions and files."""

import json
import os
import re
from pathlib import Path

import pandas as pd

from a2lib.report import style
from a2lib.report.tables import Markdown, Table

VERSIONS = ("driver", "torch", "triton", "cuda", "cudnn")


def hardware(rows: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Return devices, versions, dates and commits of the runs behind `rows`, as a phrase.

    Where runs differ in a field, all its values are named: a mixture is worth seeing.
    """
    used = runs.loc[sorted(set(rows["run"]))]
    names = used["n_devices"].astype(str) + " × " + used["device"].map(style.device_name)
    parts = _sorted_values(names)
    for field in VERSIONS:
        versions = _sorted_values(_version(field, value) for value in used[field])
        if versions:
            parts.append(f"{_title(field)} {' and '.join(versions)}")
    days = _sorted_values(used["started"].str[:10])
    parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    commits = [f"`{commit}`" for commit in _sorted_values(used["git"])]
    if commits:
        parts.append("commit " + ", ".join(commits))
    return ", ".join(parts)


def source(rows: pd.DataFrame, runs: pd.DataFrame, command: str) -> Markdown:
    """Return the line that names the rows' files, their GPU and versions, and the command that
    measures them again (see `repeating`)."""
    if not len(rows):
        return Markdown(block(f"No rows yet. To measure: `{command}`."))
    files = _sorted_values(rows["file"])
    names = {os.path.basename(file) for file in files}
    links = [link(file, folder=len(names) < len(files)) for file in files]
    data = f"Data: {', '.join(links)}."
    measured = f"Measured on {hardware(rows, runs)}."
    repeat = f"To repeat: `{repeating(command)}`."
    return Markdown(block(f"{data} {measured} {repeat}"))


def repeating(command: str) -> str:
    """Return a papermill command that measures again what is stored already, without a time limit.

    As it was called, a sweep would skip stored rows, and a limit might end it before the last.
    """
    if not command.startswith("papermill "):
        return command
    command = re.sub(r" -p (?:time_limit_s|remeasure) \S+", "", command)
    return f"{command} -p remeasure True"


def lab_record(rows: pd.DataFrame, notebook: Path) -> Markdown:
    """Return a link to the committed notebook, and how many of `rows` its runs measured. Its runs
    are those that its output names."""
    record = f"The [lab record](notebooks/{notebook.name}) is the notebook"
    printed = _printed(notebook)
    if printed is None:
        return Markdown(f"{record} without outputs.")
    runs = re.findall(r"^ *run +(\S+)$", printed, re.M)
    if not runs:
        return Markdown(f"{record} as executed; every row it shows was stored before.")
    names = ", ".join(f"`{run}`" for run in runs)
    word = "run" if len(runs) == 1 else "runs"
    measured = int(rows["run"].isin(runs).sum())
    share = f"{measured:,} of the {len(rows):,} rows of this notebook used here"
    return Markdown(f"{record} as executed in {word} {names}, which measured {share}.")


def _printed(notebook: Path) -> str | None:
    """Return what the cells of an executed notebook printed; None if it was not executed."""
    outputs = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        outputs += cell.get("outputs", [])
    if not outputs:
        return None
    return "".join("".join(output.get("text", "")) for output in outputs)


def runs_table(rows: pd.DataFrame, runs: pd.DataFrame, caption: str, name: str) -> Table:
    """Return the table of the runs behind `rows`, oldest first: rows, device, versions, command.

    What all runs have in common moves to the caption, so that the table fits a page.
    """
    used = runs.loc[sorted(set(rows["run"]))]
    frame = pd.DataFrame({"run": [f"`{run}`" for run in used.index]})
    counts = rows["run"].value_counts()
    frame["rows"] = [int(counts[run]) for run in used.index]
    frame["device"] = list(used["device"].map(style.device_name))
    for field in VERSIONS:
        frame[_title(field)] = [_version(field, value) or "–" for value in used[field]]
    frame["Python"] = list(used["python"])
    may_be_shared = list(frame.columns[2:])
    frame["commit"] = [f"`{commit}`" if commit else "–" for commit in used["git"]]
    frame["command"] = [f"`{command}`" for command in used["command"]]
    if len(frame) > 1:
        shared = [column for column in may_be_shared if frame[column].nunique() == 1]
        words = [f"{column} {frame[column][0]}".removeprefix("device ") for column in shared]
        if words:
            caption = f"{caption}; all with {', '.join(words)}"
        frame = frame.drop(columns=shared)
    return Table(frame, caption, name)


def link(file: str, folder: bool = False) -> str:
    """Return a download link to a file, relative to the folder of the page that is being built.

    With `folder` the text names the file's folder too, for when several files have the same name.
    """
    name = os.path.basename(file)
    if folder:
        name = f"{os.path.basename(os.path.dirname(file))}/{name}"
    return f"{{download}}`{name} <{os.path.relpath(file)}>`"


def block(text: str) -> str:
    """Return a text as a block in small type."""
    return f":::{{div}} a2-source\n{text}\n:::\n"


def _sorted_values(values) -> list[str]:
    """Return the values that are not blank, each once, in order."""
    return sorted({value for value in values if value})


def _version(field: str, value: str) -> str:
    """Return a version as people write it."""
    if field == "cudnn" and value.isdigit():  # 91900 is 9.19.0, and 8902 is 8.9.2
        size = 10_000 if int(value) >= 10_000 else 1000
        major, rest = divmod(int(value), size)
        return f"{major}.{rest // 100}.{rest % 100}"
    return value


def _title(field: str) -> str:
    """Return what a table calls a field of runs.csv."""
    names = {"torch": "PyTorch", "triton": "Triton", "cuda": "CUDA", "cudnn": "cuDNN"}
    return names.get(field, field)

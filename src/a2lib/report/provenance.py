"""Where rows come from: a text that names their files, machine, versions and command."""

import os

import pandas as pd

from a2lib.report import style
from a2lib.report.tables import Markdown

# Columns of runs.csv that hold versions, and what people call them.
VERSIONS = {
    "driver": "driver",
    "torch": "PyTorch",
    "triton": "Triton",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
}


def hardware(rows: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Return devices, versions, dates and commits of the runs behind `rows`, as a phrase.

    Where runs differ in a field, all its values are named: a mixture is worth seeing.
    """
    used = runs.loc[sorted(set(rows["run"]))]
    names = used["n_devices"].astype(str) + " × " + used["device"].map(style.device_name)
    parts = _sorted_values(names)
    for field, title in VERSIONS.items():
        written = used[field].map(_cudnn_version) if field == "cudnn" else used[field]
        versions = _sorted_values(written)
        if versions:
            parts.append(f"{title} {' and '.join(versions)}")
    days = _sorted_values(used["started"].str[:10])
    parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    commits = _sorted_values(used["git"].map(short_commit))
    if commits:
        parts.append(f"commit `{'`, `'.join(commits)}`")
    return ", ".join(parts)


def short_commit(commit: str) -> str:
    """Return a commit by its first eight digits, as git shows it, with `-dirty` if it has that."""
    digits, dash, dirty = commit.partition("-")
    return digits[:8] + dash + dirty


def source(rows: pd.DataFrame, runs: pd.DataFrame, command: str) -> Markdown:
    """Return the line that names the rows' files, their GPU and versions, and how to measure them
    again by ``command``, which as it is would skip what is stored."""
    if not len(rows):
        return Markdown(block(f"No rows yet. To measure: `{command}`."))
    files = _sorted_values(rows["file"])
    has_twins = len(set(map(os.path.basename, files))) < len(files)
    links = [link(file, folder=has_twins) for file in files]
    data = f"Data: {', '.join(links)}."
    measured = f"Measured on {hardware(rows, runs)}."
    repeat = f"To repeat: `{command} -p remeasure True`."
    return Markdown(block(f"{data} {measured} {repeat}"))


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
    return sorted(set(filter(None, values)))


def _cudnn_version(value: str) -> str:
    """Return a version of cuDNN as people write it: 91900 is 9.19.0, and 8902 is 8.9.2."""
    if not value.isdigit():
        return value
    size = 10_000 if int(value) >= 10_000 else 1000
    major, rest = divmod(int(value), size)
    return f"{major}.{rest // 100}.{rest % 100}"

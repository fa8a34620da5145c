"""Where figures come from: the lines under a table or a figure that name run, versions and file."""

import json
import os
import re
from pathlib import Path

import pandas as pd

from a2lib.report import style
from a2lib.report.tables import Markdown, Table

VERSIONS = ("driver", "torch", "triton", "cuda", "cudnn")


def hardware(rows: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Device, versions, dates and commits of the runs behind `rows`, in one phrase.

    Several values of one field are all named: a mixture is worth seeing.
    """
    used = runs.loc[sorted(set(rows["run"]))]
    names = {
        f"{n} × {style.device_name(d)}"
        for d, n in zip(used["device"], used["n_devices"], strict=True)
    }
    parts = [", ".join(sorted(names))]
    for field in VERSIONS:
        values = sorted({_version(field, v) for v in used[field] if v})
        if values:
            parts.append(f"{_title(field)} {' and '.join(values)}")
    days = sorted({started[:10] for started in used["started"]})
    parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    commits = sorted({commit for commit in used["git"] if commit})
    if commits:
        parts.append("commit " + ", ".join(f"`{commit}`" for commit in commits))
    return ", ".join(parts)


def source(rows: pd.DataFrame, runs: pd.DataFrame, command: str) -> Markdown:
    """The line under a figure or table: its data file, its GPU and versions, and the `command` that
    measures it, as repeating() has it."""
    if not len(rows):
        return Markdown(block(f"No rows yet. To measure: `{command}`."))
    files = sorted(set(rows["file"]))
    alike = len({os.path.basename(file) for file in files}) < len(files)
    text = f"Data: {', '.join(link(file, folder=alike) for file in files)}. "
    text += f"Measured on {hardware(rows, runs)}. To repeat: `{repeating(command)}`."
    return Markdown(block(text))


def repeating(command: str) -> str:
    """A papermill command as it measures again what is stored already, without a limit.

    A sweep skips the rows it has, and a time limit would end it before all are measured.
    """
    if not command.startswith("papermill "):
        return command
    command = re.sub(r" -p (?:time_limit_s|remeasure) \S+", "", command)
    return f"{command} -p remeasure True"


def lab_record(rows: pd.DataFrame, notebook: Path) -> Markdown:
    """What the committed notebook holds, with a link to it: how many of `rows` its run measured.

    Its runs are those that the notebook's own output names.
    """
    link = f"The [lab record](notebooks/{notebook.name})"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    if not outputs:
        return Markdown(f"{link} is the notebook without outputs.")
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    named = re.findall(r"^ *run +(\S+)$", printed, re.M)
    if not named:
        return Markdown(
            f"{link} is the notebook as executed; every row it shows was stored before."
        )
    measured = int(rows["run"].isin(named).sum())
    runs = ", ".join(f"`{run}`" for run in named)
    word = "run" if len(named) == 1 else "runs"
    text = f"{link} is the notebook as executed in {word} {runs}, which measured "
    return Markdown(f"{text}{measured:,} of the {len(rows):,} rows of this notebook used here.")


def runs_table(rows: pd.DataFrame, runs: pd.DataFrame, caption: str, name: str) -> Table:
    """Every run behind `rows`, oldest first: when, on what, with which versions and command.

    What all runs share is said in the caption, so that the table fits a page.
    """
    used = runs.loc[sorted(set(rows["run"]))]
    lines = [
        [
            f"`{run}`",
            int((rows["run"] == run).sum()),
            style.device_name(r["device"]),
            *(_version(field, r[field]) or "–" for field in VERSIONS),
            r["python"],
            f"`{r['git']}`" if r["git"] else "–",
            f"`{r['command']}`",
        ]
        for run, r in used.iterrows()
    ]
    columns = ["run", "rows", "device", *map(_title, VERSIONS), "Python", "commit", "command"]
    frame = pd.DataFrame(lines, columns=columns)
    shared = [c for c in columns[2:-2] if len(frame) > 1 and frame[c].nunique() == 1]
    if shared:
        said = [frame[c][0] if c == "device" else f"{c} {frame[c][0]}" for c in shared]
        caption = f"{caption}; all with {', '.join(said)}"
    return Table(frame.drop(columns=shared), caption, name)


def link(file: str, folder: bool = False) -> str:
    """A download link to a file, relative to the page that is being built (its folder).

    `folder` names its folder too, where several files have one name.
    """
    name = os.path.basename(file)
    if folder:
        name = f"{os.path.basename(os.path.dirname(file))}/{name}"
    return f"{{download}}`{name} <{os.path.relpath(file)}>`"


def block(text: str) -> str:
    """Text in a block of its own, set small under what it belongs to."""
    return f":::{{div}} a2-source\n{text}\n:::\n"


def _version(field: str, value: str) -> str:
    if field == "cudnn" and value.isdigit():  # 91900 is 9.19.0, and 8902 is 8.9.2
        major, rest = divmod(int(value), 10_000 if int(value) >= 10_000 else 1000)
        return f"{major}.{rest // 100}.{rest % 100}"
    return value


def _title(field: str) -> str:
    names = {"torch": "PyTorch", "triton": "Triton", "cuda": "CUDA", "cudnn": "cuDNN"}
    return names.get(field, field)

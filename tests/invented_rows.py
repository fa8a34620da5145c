"""Invented rows in the store's form, for tests: they describe no machine, and are written into a
folder of the caller's."""

import csv
from pathlib import Path

from a2lib.lab import SECTIONS, runs

RUN = "20261121T000000Z-{}-000000"
BLANK = dict.fromkeys(("ms", "ms_p20", "ms_p80", "n"), "")


def flash(implementation="eager", seq_len=128, ms=1.0, pass_="forward", **columns):
    """Return a row of the section flash: of one head in bf16, unless ``columns`` say otherwise."""
    return {
        "implementation": implementation, "dtype": "bf16", "batch": 1, "heads": 1,
        "seq_len": seq_len, "head_dim": 64, "causal": "true", "pass": pass_, "n": 50,
        "ms": ms, "ms_p20": ms, "ms_p80": ms, **columns,
    }  # fmt: skip


def write(root: Path, device="nvidia-h200", **sections) -> Path:
    """Write the rows given for each section (dictionaries of text or numbers) of one device.

    Columns left out are blank, but status is ok, and the run is one that runs.csv has.
    """
    run = RUN.format(device)
    for name, rows in sections.items():
        made = []
        for row in rows:
            made.append({"status": "ok", "run": run, **row})
        _write(Path(root) / "measured" / name / f"{device}.csv", SECTIONS[name].columns, made)
    known = dict.fromkeys(runs.COLUMNS, "") | {
        "run": run, "started": "2026-11-21T00:00:00Z", "device": device, "n_devices": 1,
        "torch": "0.0-synthetic", "git": "synthetic", "parameters": "{}",
        "command": "synthetic rows, measured on no machine",
    }  # fmt: skip
    others = [r for r in runs.read_runs(root) if r["run"] != run]
    _write(Path(root) / "measured" / "runs.csv", runs.COLUMNS, [*others, known])
    return Path(root)


def _write(file: Path, columns, rows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

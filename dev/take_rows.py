"""Take rows that were measured on another machine into data/ here.

    python dev/take_rows.py ~/from-the-gpu/data [--into data]

Of every measured table in that folder, each row whose run is newer than the one stored here, or
whose key is not, replaces it, and so does each picture of a bulk table; runs.csv takes the runs
that these name. Nothing else changes: a row that is only there already is left alone, and so is a
run that no row names.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from a2lib import paths
from a2lib.lab import SECTIONS, StoreError, Table, bulk, read_section
from a2lib.lab.runs import read_runs, runs_table


def take(source: Path, target: Path) -> dict[tuple[str, str], int]:
    """Rows taken, by (section, device), and pictures by (bulk table, device). Raises StoreError for
    a broken table on either side."""
    if not (source / "measured" / "runs.csv").is_file():
        raise StoreError(f"{source}: no measured/runs.csv in it; name a data folder")
    found = {run["run"]: run for run in read_runs(source)}
    started = {run["run"]: run["started"] for run in read_runs(target)} | {
        name: run["started"] for name, run in found.items()
    }
    taken = {}
    for section in SECTIONS.values():
        for device, rows in read_section(section, source).items():
            store, runs = Table(section, device, target), runs_table(target)
            stored = {tuple(row[c] for c in section.key): row for row in store.rows()}
            for row in rows:
                mine = stored.get(tuple(row[c] for c in section.key))
                if mine is None or started[mine["run"]] < started[row["run"]]:
                    runs.put(found[row["run"]])
                    store.put(row)
                    taken[section.name, device] = taken.get((section.name, device), 0) + 1
    for table in bulk.TABLES:
        there = set(bulk.pictures(table, target))
        for device, name in bulk.pictures(table, source):
            picture = bulk.read(table, device, name, source)
            if picture.run not in found:
                raise StoreError(f"{table} {name} of {device}: run {picture.run} is not in its "
                                 "runs.csv")  # fmt: skip
            mine = bulk.read(table, device, name, target) if (device, name) in there else None
            if mine is None or started[mine.run] < started[picture.run]:
                runs_table(target).put(found[picture.run])
                bulk.put(table, device, name, picture.rows, run=picture.run, about=picture.about,
                         data=target)  # fmt: skip
                key = f"bulk {table}", device
                taken[key] = taken.get(key, 0) + 1
    return taken


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a data folder measured elsewhere")
    parser.add_argument("--into", type=Path, default=paths.ROOT / "data")
    given = parser.parse_args(arguments)
    try:
        taken = take(given.source, given.into)
    except StoreError as error:
        print(f"take_rows: {error}", file=sys.stderr)
        return 1
    for (section, device), n in taken.items():
        print(f"{section}, {device}: {n} {'pictures' if section.startswith('bulk ') else 'rows'}")
    print(f"{sum(taken.values())} rows and pictures taken")
    return 0


if __name__ == "__main__":
    sys.exit(main())

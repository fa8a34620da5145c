"""Compare rows that were measured again with the committed ones of the same key and device.

    python dev/compare_rows.py FOLDER [--with data]

For each table: how many rows there are in both, in how many the status and each column of bytes are
equal, and the ratio new / committed of each column of times: its median, least and most. With `--as
nvidia-h200` rows of another GPU are held against that one's: bytes may be equal, times are not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from a2lib import paths
from a2lib.lab import SECTIONS, StoreError, read_section

TIMES = ("ms", "ms_graph", "ms_host", "ms_without")


def pairs(name: str, new: Path, old: Path, device: str = "") -> list[tuple[dict, dict]]:
    """Return the rows of a table that both folders have, the new one first; the committed ones of
    `device`, or of each row's own."""
    key = SECTIONS[name].key
    committed = read_section(name, old)
    both = []
    for own, rows in read_section(name, new).items():
        stored = {tuple(row[c] for c in key): row for row in committed.get(device or own, [])}
        for row in rows:
            before = stored.get(tuple(row[c] for c in key))
            if before is not None:
                both.append((row, before))
    return both


def describe(both: list[tuple[dict, dict]]) -> list[str]:
    """Return lines about such pairs: statuses, bytes, times."""
    same_status = [(row, before) for row, before in both if row["status"] == before["status"]]
    lines = [f"{len(both)} rows in both, {len(same_status)} with the same status"]
    for column in [c for c in both[0][0] if c.endswith("_bytes")]:
        equal = [row[column] == before[column] for row, before in same_status if before[column]]
        if equal:
            lines.append(f"{column}: {sum(equal)} of {len(equal)} equal")
    for column in TIMES:
        ratios = [
            float(row[column]) / float(before[column])
            for row, before in same_status
            if row.get(column) and before.get(column)
        ]
        if ratios:
            middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
            count = len(ratios)
            lines.append(f"{column}: median {middle:.3f}, {least:.3f} to {most:.3f}, {count} rows")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a data folder measured again")
    parser.add_argument("--as", dest="device", default="", help="the committed rows' device")
    parser.add_argument("--with", dest="old", type=Path, default=paths.ROOT / "data")
    options = parser.parse_args(arguments)
    try:
        for name in SECTIONS:
            both = pairs(name, options.folder, options.old, options.device)
            if both:
                print(f"{name}: " + "\n    ".join(describe(both)))
    except StoreError as error:
        print(f"compare_rows: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

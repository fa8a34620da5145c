"""The notebook's text table and its figure; not for the book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from a2lib.experiments.harness.picture import subplots
from a2lib.experiments.harness.tables import Table, number, table

Row = Mapping[str, str]
BYTES = ("held_bytes", "kept_bytes", "peak_bytes", "reserved_bytes")


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each setting, in it a line for each strategy: times of the step, its forward and
    backward (ms) and memory (GB), or why there is none."""
    heads = ["step, ms", "forward", "backward", "held, GB", "kept", "peak", "reserved", ""]
    made = []
    for setting, mine in _by_setting(rows).items():
        body = []
        for row in mine:
            times = [_ms(row[column]) for column in ("ms", "ms_forward", "ms_backward")]
            memory = [_gb(row[column]) for column in BYTES]
            first = times[0] if row["status"] == "ok" else row["status"]
            body.append([row["strategy"], first, *times[1:], *memory, row["note"]])
        says = f"{setting}: time and memory of a step."
        made.append(table(body, ["strategy", *heads], says))
    return made


def figure(rows: Sequence[Row]):
    """The peak against the time of a step, a panel for each setting; None without rows."""
    groups = _by_setting([row for row in rows if row["ms"]])
    if not groups:
        return None
    # A CPU counts no bytes: then the strategies stand one after another.
    has_bytes = any(row["peak_bytes"] for mine in groups.values() for row in mine)
    drawn, axes = subplots(len(groups), 1, figsize=(8, 3.5 * len(groups)), squeeze=False)
    for ax, (setting, mine) in zip(axes.flat, groups.items(), strict=True):
        places = [int(row["peak_bytes"] or 0) / 1e9 if has_bytes else i
                  for i, row in enumerate(mine)]  # fmt: skip
        times = [float(row["ms"]) for row in mine]
        ax.scatter(times, places)
        for row, x, y in zip(mine, times, places, strict=True):
            ax.annotate(row["strategy"], (x, y), (4, 2), textcoords="offset points", fontsize=7)
        ax.set(title=setting, xlabel="step, ms")
        ax.set(ylabel="peak beyond what is held, GB" if has_bytes else "")
        if has_bytes:
            ax.set(xscale="log", yscale="log")
    return drawn


def _by_setting(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_setting(row), []).append(row)
    return groups


def _setting(row: Row) -> str:
    return (
        f"{row['model']}, {row['layers']} blocks, {row['context']}, {row['precision']} "
        f"{row['attention']}, {row['gradients']}"
    )


def _ms(cell: str) -> str:
    return number(float(cell)) if cell else "-"


def _gb(cell: str) -> str:
    return f"{int(cell) / 1e9:.2f}" if cell else "-"

"""The notebook's text tables and its figure; not for the book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from a2lib.experiments.harness.picture import subplots
from a2lib.experiments.harness.tables import Table, table
from a2lib.experiments.memory.configurations import BLOCK, STEPS, Case
from a2lib.measure.snapshot import CATEGORIES
from a2lib.theory.memory.saved import block_saved_bytes
from a2lib.theory.memory.step import asked, peak

Row = Mapping[str, str]


def case(row: Row) -> Case:
    """The one that a stored row is of."""
    return Case(row["model"], int(row["context"]), row.get("mode", "forward-backward"),
                row["precision"], row["attention"], int(row["batch"]))  # fmt: skip


def peaks(rows: Sequence[Row], device: str) -> Table:
    """A line for each configuration: GB of tensors at the peak of either step beside what is
    counted; of the last one the phase of the peak, and GB of blocks, reserved, and by the driver;
    or why there is none."""
    body: dict[str, list[str]] = {}
    for row in rows:
        if row["phase"] != "step":
            continue
        one, step = case(row), int(row["step_number"])
        counted = peak(one.counted(step))
        whole = asked(one.counted(step)) if device == "cuda" else counted.total
        cells = body.setdefault(str(one), ["-"] * 9)
        cells[2 * step : 2 * step + 2] = _gb(row["tensor_bytes"]), _gb(whole)
        if step == STEPS[-1]:
            taken = ("allocated_bytes", "reserved_bytes", "driver_bytes")
            cells[4:8] = counted.phase, *(_gb(row[column]) for column in taken)
        cells[8] = row["note"].partition(". ")[0]
    heads = ["", "tensors, step 0", "counted", "step 1", "counted", "in", "blocks", "reserved"]
    body = [[name, *cells] for name, cells in body.items()]
    return table(body, [*heads, "driver", ""], "The peak of each step, measured and counted, GB.")


def recordings(rows: Sequence[Row], device: str) -> Table:
    """A line for each recorded step."""
    count = asked if device == "cuda" else lambda step: peak(step).total
    body = [
        [str(case(row)), row["step_number"], row["allocations"] or row["status"],
         _gb(row["tensor_bytes"]), "-" if row["mode"] == BLOCK else
         _gb(count(case(row).counted(int(row["step_number"])))),
         row["unexplained_bytes"], row["note"]]
        for row in rows
    ]  # fmt: skip
    heads = ["", "step", "tensors made", "peak, GB", "counted", "unexplained, bytes", ""]
    return table(body, heads, "The allocations of a step: their peak, and what explains it.")


def blocks(rows: Sequence[Row]) -> Table:
    """A line for each block: bytes by hooks, by the allocator and by formula, and of gradients."""
    body = []
    for row in rows:
        one = case(row)
        formula = block_saved_bytes(one.shape, one.batch, one.context, one.attention, one.precision)
        cells = [f"{int(row[c]):,}" if row[c] else "-"
                 for c in ("saved_bytes", "grown_bytes", "gradient_bytes")]  # fmt: skip
        name = f"{one.model} {one.context} {one.precision} {one.attention}"
        body.append([name, cells[0], f"{formula:,}", *cells[1:], row["note"]])
    heads = ["block", "by hooks", "formula", "by allocator", "gradients", ""]
    return table(body, heads, "Bytes that a block keeps for its backward pass.")


def figure(rows: Sequence[Row]):
    """A recorded step's timeline, stacked by category; None without rows."""
    if not rows:
        return None
    drawn, ax = subplots(figsize=(8, 3.6))
    times = [(row["time_us"] - rows[0]["time_us"]) / 1e3 for row in rows]
    ax.stackplot(times, [[row[c] / 1e9 for row in rows] for c in CATEGORIES], labels=CATEGORIES,
                 step="post")  # fmt: skip
    ax.set(xlabel="host time (ms)", ylabel="GB")
    ax.legend(fontsize=7, loc="lower center")
    return drawn


def _gb(cell) -> str:
    return f"{int(cell) / 1e9:.4g}" if cell else "-"

"""FSDP: what a rank holds beside the count, and each all-gather beside what it hides behind."""

from pathlib import Path

import pandas as pd

from a2lib.lab import bulk
from a2lib.report.plots import inside, stacks
from a2lib.report.style import Chart, chart
from a2lib.theory import fsdp as theory
from a2lib.theory.memory.step import StepMemory
from a2lib.theory.sharding import REST, Held
from a2lib.theory.transformer import SIZES

MARK_MS = 0.01  # a wait of this length is the two events' own time
PASSES = ("forward", "backward")
REPLICATED = {"ddp": False, "zero1": True}  # is the optimizer's state sharded?
PARTS = {  # a column of bytes, and what the figure calls it
    "parameter_bytes": "weights",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "moments",
    "whole_bytes": "gathered, in flight",
    "travelling_bytes": "gathered, in flight",
}
SHADES = {
    "weights": "#0072b2",
    "gradients": "#a86f00",
    "moments": "#d55e00",
    "gathered, in flight": "#00825f",
    "activations": "#808080",
}


def columns(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """The steps with what one traced step of ours says of its all-gathers: how many there are
    (``gathers``), how many had ended by their unit's turn (``in_time``), what the others cost
    (``stood``), and when each pass ended (``forward_ms``, ``backward_ms``), from the step's begin;
    blank for a step that was not traced."""
    return rows.join(pd.DataFrame([_traced(r) for r in rows.itertuples()], rows.index))


def _traced(row) -> dict:
    table = gathers(row) if row.wrapper == "fsdp" else None
    if table is None:
        return {}
    late = table[(table["slack_ms"] < 0) & (table["waited_ms"] > MARK_MS)]
    ends = table.groupby("pass")["compute_end_ms"].max()
    own = table[table["unit"] != "root"].groupby("pass")
    n, stood = len(table), late["waited_ms"].sum()
    found = {"gathers": n, "in_time": n - len(late), "stood": stood}
    found |= {f"{name}_ms": ends[name] for name in PASSES}
    for name, few in own:
        found[f"gather_{name}"] = (few["gather_end_ms"] - few["gather_start_ms"]).median()
        found[f"block_{name}"] = (few["compute_end_ms"] - few["compute_start_ms"]).median()
    return found


def gathers(row) -> pd.DataFrame | None:
    """The all-gathers of the traced step of a row, from the step's begin; None if not traced."""
    root = Path(row.file).parents[2]
    way = "captured" if row.capture else "launched"
    name = f"fsdp-{row.model}-{way}-{row.world_size}-ranks"
    if (row.device, name) not in bulk.pictures("gathers", root):
        return None
    return pd.DataFrame(bulk.read("gathers", row.device, name, root).rows)


def held(rows: pd.DataFrame, rows_of=None) -> pd.DataFrame:
    """What a rank holds, with ``activations`` (what no component names), ``counted`` (the formula's
    bytes; where the model is whole, of the peak without compiled blocks), and ``whole``, the bytes
    at the moment: of the peak the most that tensors took."""
    rows = rows.sort_values("step_number")
    first = rows["moment"].isin(["init", "before", "after"]) & (rows["step_number"] == 0)
    rows = rows[first | rows["moment"].isin(["forward", "peak"])].copy()
    known = rows[[*PARTS]].sum(axis=1)
    rows["activations"] = rows["present_bytes"] - known
    rows["whole"] = rows["tensor_bytes"].fillna(rows["present_bytes"])
    left = rows[rows["moment"] == "forward"].set_index(["wrapper", "model"])["activations"]
    rows["counted"] = [
        _counted(r, left.get((r.wrapper, r.model), float("nan"))) for r in rows.itertuples()
    ]
    return rows


def _counted(row, activations: float) -> float:
    if row.wrapper in REPLICATED:  # a peak's is of blocks that are not compiled
        count = replicated(row.model, REPLICATED[row.wrapper])
        if row.moment in ("forward", "peak"):
            return float("nan") if row.moment == "forward" else count.peak()
        return sum(size for part, size in count.at(row.moment).items() if part != REST)
    shape = SIZES[row.model]
    if row.moment == "peak":
        return theory.peak(shape, int(row.world_size), activations).total
    if row.moment == "forward":
        every = theory.step(shape, int(row.world_size), activations)
        return next(held.total for held in every if held.moment == "backward root")
    return {h.moment: h.total for h in theory.between(shape, int(row.world_size))}[row.moment]


def replicated(model: str, sharded: bool) -> Held:
    """The count of data parallelism of the same step, with the optimizer's state whole or
    sharded."""
    step = StepMemory(SIZES[model], 4, 512, precision="bf16", attention="flash")
    return Held(step, 2, sharded)


def memory(rows: pd.DataFrame, model: str) -> Chart:
    """What each of two GPUs holds, GB: after the update by data parallelism, with a sharded
    optimizer and by FSDP, and FSDP's peak."""
    few = rows[(rows["model"] == model) & rows["moment"].isin(["after", "peak"])]
    parts = PARTS | {"activations": "activations"}
    few = few.set_index(["wrapper", "moment"])[[*parts]].astype(float)
    names = {"ddp": "DDP", "zero1": "sharded optimizer", "fsdp": "FSDP"}
    shown = {name: few.loc[(wrapper, "after")] for wrapper, name in names.items()}
    shown["FSDP, at its peak"] = few.loc[("fsdp", "peak")]
    frame = pd.DataFrame(shown).groupby(parts).sum().T / 1e9
    text = [f"{total:.0f}" for total in frame.sum(axis=1)]
    return stacks(frame, SHADES, 2.9, columns=3, text=text, xlabel="GB on each of two GPUs")


@chart(height=1.8)
def lanes(figure, table: pd.DataFrame, until_ms: float):
    """All-gathers above what the units compute, from a step's begin; waits are orange."""
    few = table[table["gather_start_ms"] < until_ms]
    ax = figure.subplots()
    edge = {"edgecolor": "#ffffff", "linewidth": 0.6}
    for y, what, colour in ((1.1, "gather", "#0072b2"), (0.1, "compute", "#808080")):
        start, end = few[f"{what}_start_ms"], few[f"{what}_end_ms"]
        ax.broken_barh(
            list(zip(start, end - start, strict=True)), (y, 0.8), facecolor=colour, **edge
        )
    late = few[few["waited_ms"] > MARK_MS]
    waits = list(zip(late["turn_ms"], late["waited_ms"], strict=True))
    ax.broken_barh(waits, (0.1, 0.8), facecolor="#d55e00")
    for row in few.itertuples():
        name = "root" if row.unit == "root" else row.unit.removeprefix("layers.")
        for y, start, end in (
            (1.5, row.gather_start_ms, row.gather_end_ms),
            (0.5, row.compute_start_ms, row.compute_end_ms),
        ):
            if end - start > 0.04 * until_ms and end < until_ms:
                inside(ax, name, ((start + end) / 2, y), "#ffffff")
    ax.set(ylim=(0, 2), xlim=(0, until_ms), xlabel="ms from the step's begin")
    ax.set_yticks([1.5, 0.5], ["gathers", "computes"])
    ax.grid(False, axis="y")

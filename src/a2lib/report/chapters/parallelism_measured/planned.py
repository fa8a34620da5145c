"""The planner's memory beside every measured peak of a whole model's step on one GPU."""

from __future__ import annotations

import pandas as pd

from a2lib.report.chapters.parallelism_measured.answer import signed
from a2lib.report.chapters.parallelism_measured.rows import Beside
from a2lib.report.metrics import pick
from a2lib.report.tables import Markdown, Table
from a2lib.theory.devices import DEVICES
from a2lib.theory.jobs import ATTENTIONS, Job
from a2lib.theory.layouts import STRATEGIES, Layout, evaluate
from a2lib.theory.transformer import SIZES

PROMISED = 0.05
NAMES = {"benchmark": "[whole models](benchmark.md)", "memory": "[memory](memory.md)",
         "checkpointing": "[checkpointing](checkpointing.md)"}  # fmt: skip
PRECISIONS = ("fp32", "tf32", "bf16")  # 16-bit weights with masters are no plan's
DEVICE = DEVICES["H200"]


def peaks(p: Beside) -> pd.DataFrame:
    """Measured peaks of training steps that a plan describes: section, model, context, precision,
    attention, `blocks again`, the `moment` that the plan names, `bytes`, and how far `off` it is.

    A process that has captured a step keeps workspaces for the capture's stream, too, which are
    taken off.
    """
    every = p.read("benchmark")[0]
    captured = set(every.loc[every["capture"].astype(bool), "run"])
    steps = pick(every, mode="train-step", phase="step", compile="none", capture=False, status="ok")
    more = steps["run"].isin(captured) * DEVICE.workspace
    found = [steps.assign(section="benchmark", bytes=steps["peak_bytes"].astype(float) - more)]
    steps = pick(p.read("memory")[0], mode="train-step", phase="step", status="ok")
    steps = steps[steps["step_number"] == steps["step_number"].max()]  # has the optimizer's state
    found.append(steps.assign(section="memory", bytes=steps["allocated_bytes"].astype(float)))
    steps = pick(p.read("checkpointing")[0], status="ok", gradients="fresh")
    steps = steps[steps["strategy"].isin(STRATEGIES)]
    steps = steps[steps["layers"] == steps["model"].map(lambda name: SIZES[name].num_layers)]
    bytes_ = (steps["held_bytes"] + steps["peak_bytes"]).astype(float) + DEVICE.workspace
    found.append(steps.assign(section="checkpointing", bytes=bytes_))
    columns = ["section", "model", "batch", "context", "precision", "attention", "strategy",
               "bytes"]  # fmt: skip
    rows = pd.concat([one.reindex(columns=columns) for one in found], ignore_index=True)
    rows = rows[rows["attention"].isin(ATTENTIONS) & rows["precision"].isin(PRECISIONS)]
    rows = rows.dropna(subset=["bytes"]).fillna({"strategy": "none"})
    plans = [_plan(row) for row in rows.itertuples()]
    return rows.assign(moment=[plan.moment for plan in plans],
                       off=[plan.memory_bytes for plan in plans] / rows["bytes"] - 1)  # fmt: skip


def _plan(row):
    precision = "bf16" if row.precision == "bf16" else "fp32"
    job = Job(SIZES[row.model], DEVICE, 1, int(row.batch), int(row.context), 0.0, precision,
              row.attention)  # fmt: skip
    return evaluate(job, Layout(sharding="none", checkpointing=row.strategy))


def sentence(p: Beside) -> Markdown:
    """How far the planner is from the peaks, and how many are within what it promises."""
    found = peaks(p)
    if not len(found):
        return Markdown(p.not_yet("the peaks that the planner's memory is held against"))
    off = found["off"]
    within = int((off.abs() <= PROMISED).sum())
    worst = found.loc[off.abs().idxmax()]
    return Markdown(
        f"Its memory is {signed(off.min())} to {signed(off.max())} off the measured peaks of "
        f"{len(found)} training steps, {signed(off.median())} in the middle; {within} are within "
        f"{PROMISED:.0%}. The furthest is {worst['model']} at {int(worst['context']):,} tokens in "
        f"{worst['precision']} with {worst['attention']} attention, of "
        f"{worst['bytes'] / 1e9:.1f} GB."
    )


def table(p: Beside, caption: str, name: str) -> Table:
    """The same by section and by the moment that the plan says is the fullest."""
    lines = []
    for (section, moment), group in peaks(p).groupby(["section", "moment"], sort=False):
        off, sizes = group["off"], group["bytes"] / 1e9
        lines.append([NAMES[section], moment, len(group), f"{sizes.min():.1f} to {sizes.max():.1f}",
                      *map(signed, (off.min(), off.median(), off.max()))])  # fmt: skip
    columns = ["rows of", "fullest at", "steps", "GB", "off: least", "median", "most"]
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=2, keys=2)

"""The planner with the links that collectives were fitted to, beside the maker's."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from a2lib.report.chapters.collectives import line
from a2lib.report.chapters.parallelism_measured.answer import machine, signed
from a2lib.report.chapters.parallelism_measured.rows import Beside
from a2lib.report.metrics import pick
from a2lib.report.style import digits, listed
from a2lib.report.tables import Markdown, Table
from a2lib.theory.devices import DEVICES, Device
from a2lib.theory.jobs import Job
from a2lib.theory.latency import Line, wire_share
from a2lib.theory.layouts import Layout, evaluate
from a2lib.theory.transformer import SIZES

N, SIZE, BATCH, CONTEXT = 2, "8B", 2, 32_768  # a step of the 2026 leaderboard
NAME = "H200"
# A call among others in a row, as in a step.
COLUMN = "ms_queued"
CALLS = {"all_reduce": "all-reduces", "all_gather": "gathers", "reduce_scatter": "scatters"}
LAYOUTS = {
    "data, state cut": Layout(data=N, sharding="zero1"),
    "FSDP": Layout(data=N, sharding="fsdp", checkpointing="block"),
    "tensor": Layout(tensor=N),
}


def fitted(p: Beside, n: int = N) -> Line | None:
    """The line of NCCL's all-reduces between ``n`` GPUs; None where their rows are too few."""
    return line.fitted(p.collectives, f"nccl {n}", COLUMN)


def device(p: Beside, n: int = N) -> Device | None:
    """The planner's device with the fitted latency and, as each rank sends in a ring, bandwidth."""
    found = fitted(p, n)
    if found is None:
        return None
    link = found.bandwidth * wire_share("all_reduce", n)
    return replace(DEVICES[NAME], link=link, latency=found.overhead_s)


def sentence(p: Beside) -> Markdown:
    """The command that plans with what was fitted, and the fit beside this page's own rows."""
    own = device(p)
    if own is None:
        return Markdown(p.not_yet("the all-reduces that the planner's links are fitted to"))
    text = (
        f"Fitted to NCCL's all-reduces between {N} {p.short}, rows of other runs: "
        f"{digits(own.latency * 1e6)} µs a message and {digits(own.link / 1e9)} GB/s that each "
        f"sends, where the maker states {DEVICES[NAME].link / 1e9:.0f}. "
        f"`python -m a2lib.theory plan --size {SIZE} --devices {N} --batch {BATCH} "
        f"--context {CONTEXT} --bandwidth {own.link:.4g} --latency-us {own.latency * 1e6:.4g}` "
        "plans with them."
    )
    text += _agreement(p, own)
    found = machine(p, "nccl", N)
    if found is not None:
        rows = p.of(found, scheme="dp", phase="backward", d_ff=found.layer.d_ff)
        measured = rows["ms_communication"].astype(float).median() / found.layers
        said = 1e3 * fitted(p).time_s(found.layer.weight_bytes)
        text += (
            f" To the gradients of one layer above, {digits(found.layer.weight_bytes / 1e6)} MB, "
            f"the line gives {digits(said)} ms; they took {digits(measured)} ms."
        )
    return Markdown(text)


def table(p: Beside, caption: str, name: str) -> Table:
    """Seconds on the links and of the step, by layout, with either links."""
    own, lines = device(p), []
    for label, layout in LAYOUTS.items() if own else ():
        plans = [evaluate(Job(SIZES[SIZE], one, N, BATCH, CONTEXT), layout)
                 for one in (DEVICES[NAME], own)]  # fmt: skip
        lines.append([label, *(digits(plan.busy["node links"]) for plan in plans),
                      *(digits(plan.step_s) for plan in plans),
                      *(digits(plan.serial_s) for plan in plans), plans[1].bound])  # fmt: skip
    columns = ["layout", "links, s: maker's", "fitted", "step at least, s: maker's", "fitted ",
               "nothing hidden, s: maker's", "fitted  ", "bound by"]  # fmt: skip
    return Table(pd.DataFrame(lines, columns=columns), caption, name, left=1)


def _agreement(p: Beside, own: Device) -> str:
    """How far the planner's time of a message is from each measured one, by operation."""
    told = []
    for operation, name in CALLS.items():
        rows = pick(p.collectives.table, ranks=f"nccl {N}", operation=operation, status="ok")
        rows = rows.dropna(subset=[COLUMN])
        off = [(own.latency + row.size * wire_share(operation, N) / own.link) * 1e3
               / getattr(row, COLUMN) - 1 for row in rows.itertuples()]  # fmt: skip
        if off:
            told.append(f"{signed(min(off))} to {signed(max(off))} in {len(off)} {name}")
    return f" Its times of a message are off the measured ones by {listed(told)}."

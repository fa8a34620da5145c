"""Plans of whole Transformers, computed when the page is built."""

from __future__ import annotations

from functools import cache

import pandas as pd

from a2lib.report import style
from a2lib.report.tables import Table
from a2lib.theory.devices import DEVICES
from a2lib.theory.layouts import Job, Plan
from a2lib.theory.planner import search
from a2lib.theory.transformer import SIZES, Shape, parameter_count

# The widths of communication_accounting in blocks that have attention and a gate too: 60 of them
# have about as many parameters as its 126.
WIDE = Shape(16_384, 53_248, 60, 128, vocab_size=128_256)
# A step of the 2026 leaderboard; the same model on a batch of pre-training; the wide one likewise.
JOBS = (
    Job(SIZES["8B"], DEVICES["H200"], 2, 2, 32_768),
    Job(SIZES["8B"], DEVICES["H200"], 64, 128, 4096),
    Job(WIDE, DEVICES["H100"], 4096, 2048, 8192),
)


@cache
def planned() -> tuple[Plan, ...]:
    """The plans of shortest floor, and that of the last job if nothing hides."""
    return (*(search(job) for job in JOBS), search(JOBS[-1], overlap=False))


def numbers() -> dict[str, str]:
    """What the prose says, by name."""
    two, many, wide, apart = planned()
    logits = two.memory["temporaries"] - JOBS[0].device.workspace
    return {
        "plan_headroom": f"{100 * JOBS[0].headroom:g} %",
        "plan_two_step": _seconds(two.step_s),
        "plan_two_logits": f"{logits / 1e9:.0f} GB",
        "plan_many_step": _seconds(many.step_s),
        "plan_wide_step": _seconds(wide.step_s),
        "plan_wide_serial": _seconds(wide.serial_s),
        "plan_wide_talk": _seconds(wide.busy["node links"] + wide.busy["network"]),
        "plan_apart_tensor": str(apart.layout.tensor),
        "plan_wide_tensor": str(wide.layout.tensor),
        "plan_apart_serial": _seconds(apart.serial_s),
        "plan_wide_parameters": f"{parameter_count(WIDE) / 1e9:.0f}",
    }


def plans(caption: str, label: str) -> Table:
    """The best layout of each job, and what it holds and takes."""
    rows: dict[str, list[str]] = {}

    def say(name: str, *cells) -> None:
        rows[name] = [str(cell) for cell in cells]

    found, jobs = planned(), (*JOBS, JOBS[-1])
    say("sequences × tokens", *(f"{job.batch:,} × {job.context:,}" for job in jobs))
    say("devices used", *(f"{p.layout.devices:,}" for p in found))
    for axis in ("data", "tensor", "pipeline", "context"):
        say(axis, *(getattr(p.layout, axis) for p in found))
    say("micro-batches", *(p.layout.microbatches for p in found))
    say("state", *(p.layout.sharding for p in found))
    say("checkpointing", *(p.layout.checkpointing for p in found))
    for part in found[0].memory:
        say(f"{part}, GB", *(f"{p.memory[part] / 1e9:.1f}" for p in found))
    say("together, GB", *(f"{p.memory_bytes / 1e9:.1f}" for p in found))
    say("allowed, GB", *(f"{job.memory / 1e9:.1f}" for job in jobs))
    say("step at least", *(_seconds(p.step_s) for p in found))
    say("with nothing hidden", *(_seconds(p.serial_s) for p in found))
    say("bound by", *(p.bound for p in found))
    lines = [[name, *cells] for name, cells in rows.items()]
    columns = [" ", *(_name(job) for job in JOBS), "the same, nothing hidden"]
    return Table(pd.DataFrame(lines, columns=columns), caption, label)


def _name(job: Job) -> str:
    device = next(name for name, device in DEVICES.items() if device is job.device)
    size = next((name for name, shape in SIZES.items() if shape == job.shape), None)
    return f"{size or f'{parameter_count(job.shape) / 1e9:.0f}B'} on {job.devices:,} {device}"


def _seconds(value: float) -> str:
    return f"{style.digits(value)}\N{NO-BREAK SPACE}s"

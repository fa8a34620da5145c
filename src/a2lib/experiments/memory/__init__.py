"""The memory experiment: what the cells of notebooks/memory.ipynb call.

``configurations`` says what is measured, ``handlers`` how a worker does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from a2lib.experiments.harness import view
from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Key, Task
from a2lib.experiments.memory.configurations import (
    BLOCK,
    STEPS,
    Parameters,
    counted,
    phases,
    picture,
)
from a2lib.experiments.steps import Configuration
from a2lib.measure import MEMORY, MEMORY_BLOCK, MEMORY_RECORDING, StoreError, bulk
from a2lib.measure.snapshot import CATEGORIES
from a2lib.theory.memory.saved import block_saved_bytes
from a2lib.theory.memory.step import asked, peak


def peak_tasks(given: Parameters, device: str, sweep: str = "table") -> list[Task]:
    """A task for each configuration, every phase of both steps."""
    return [
        _task(
            one,
            "",
            (
                {**one.key(MEMORY), "step_number": step, "phase": phase}
                for step in STEPS
                for phase in phases(one)
            ),
        )
        for one in given.configurations(sweep, device)
    ]


def recording_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each configuration, both steps."""
    return [
        _task(one, "recording ", ({**one.key(MEMORY), "step_number": step} for step in STEPS))
        for one in given.configurations("recordings", device)
    ]


def block_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each block."""
    return [
        _task(one, "a block of ", [one.key(MEMORY_BLOCK)])
        for one in given.configurations("blocks", device)
    ]


def _task(configuration: Configuration, what: str, keys: Iterable[Key]) -> Task:
    return Task.whole(f"{what}{configuration}", dataclasses.asdict(configuration), keys)


def _of(row: view.Row) -> Configuration:
    names = ("model", "mode", "precision", "attention")
    return Configuration(
        context=int(row["context"]),
        batch=int(row["batch"]),
        **{name: row[name] for name in names if name in row},
    )


def _counted(row: view.Row) -> int | None:
    """The bytes that the theory has for a step: what it asks of a GPU's allocator, or of a CPU."""
    if row.get("phase", "step") != "step" or row["mode"] == BLOCK:
        return None
    step = counted(_of(row), int(row["step_number"]))
    return peak(step).total if "-cpu-" in row["run"] else asked(step)


def _formula(row: view.Row) -> int:
    one = _of(row)
    return block_saved_bytes(one.shape, one.batch, one.context, one.attention, one.precision)


PEAKS = Table(
    MEMORY,
    peak_tasks,
    says="The peak of tensors in each phase; of a step what is counted, and what an allocator took",
    shown=("tensor_bytes", "counted_bytes", "allocated_bytes", "reserved_bytes", "driver_bytes"),
    derived={"counted_bytes": _counted},
    across="phase",
    keep_worker=True,
)
RECORDINGS = Table(
    MEMORY_RECORDING,
    recording_tasks,
    says="The allocations of a step: their peak, and what explains it",
    shown=("allocations", "tensor_bytes", "counted_bytes", "unexplained_bytes"),
    derived={"counted_bytes": _counted},
    keep_worker=True,
)
BLOCKS = Table(
    MEMORY_BLOCK,
    block_tasks,
    says="What a block keeps for its backward pass, by hooks, by formula and by the allocator",
    shown=("saved_bytes", "formula_bytes", "grown_bytes", "gradient_bytes"),
    derived={"formula_bytes": _formula},
    keep_worker=True,
)
SIZES = dataclasses.replace(
    PEAKS, tasks=lambda given, device: peak_tasks(given, device, "sizes"), keep_worker=False
)
EXPERIMENT = Experiment(
    Parameters,
    (PEAKS, RECORDINGS, BLOCKS, SIZES),
    "Where the memory goes",
    tiny=lambda given: given.model == "auto",
)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
measure_peaks, measure_recordings = PEAKS.measure_and_show, RECORDINGS.measure_and_show
measure_blocks, measure_sizes = BLOCKS.measure_and_show, SIZES.measure_and_show


def draw(run: Run):
    """The second step of the first recording asked for, its bytes by category, as a matplotlib
    figure; None where it is not stored."""
    for one in run.parameters.configurations("recordings", run.device)[:1]:
        try:
            rows = bulk.read("memory", run.slug, f"{picture(one)}-{STEPS[-1]}", run.data).rows
        except StoreError as error:
            print(error)
            continue
        figure, ax = view.subplots(figsize=(8, 3.6))
        times = [(row["time_us"] - rows[0]["time_us"]) / 1e3 for row in rows]
        levels = [[row[c] / 1e9 for row in rows] for c in CATEGORIES]
        ax.stackplot(times, levels, labels=CATEGORIES, step="post")
        ax.set(xlabel="host time (ms)", ylabel="GB")
        ax.legend(fontsize=7, loc="lower center")
        return figure
    return None

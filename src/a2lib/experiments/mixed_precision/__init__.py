"""The mixed-precision experiment: what the cells of notebooks/mixed_precision.ipynb call.

``settings`` says what is looked at, ``handlers`` how a worker does it. Times of whole models in
each precision are the benchmark's.
"""

from __future__ import annotations

from a2lib.experiments.harness import view
from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.mixed_precision.settings import (
    AUTOCAST,
    DTYPES,
    TENSORS,
    Parameters,
    layernorm_keys,
    loop_key,
    loop_of,
    name_of,
)
from a2lib.measure import ACCUMULATION, AUTOCAST_DTYPES, LAYERNORM
from a2lib.theory.floating import decimal


def sum_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each loop."""
    return [Task.whole(name_of(loop), {}, [loop_key(loop)]) for loop in given.loops]


def dtype_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each autocast, every tensor of the toy model."""
    return [
        Task.whole(f"autocast {low}", {}, [{"autocast": low, "quantity": t} for t in TENSORS])
        for low in AUTOCAST
    ]


def part_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each dtype, every part of a layer norm."""
    keys = layernorm_keys(given.features)
    return [
        Task.whole(f"layer norm in {dtype}", {}, [key for key in keys if key["dtype"] == dtype])
        for dtype in DTYPES
    ]


SUMS = Table(
    ACCUMULATION,
    sum_tasks,
    says="What each loop comes to, what is predicted, and how far that is from the exact sum",
    shown=(),
    derived={
        "result": lambda row: row["computed"],  # every digit of it
        "predicted": lambda row: decimal(loop_of(row).result()),
        "equal": lambda row: "yes" if row["computed"] == decimal(loop_of(row).result()) else "no",
        "off by": lambda row: decimal(loop_of(row).result() - loop_of(row).exact),
    },
    keep_worker=True,
)
DTYPES_SEEN = Table(
    AUTOCAST_DTYPES,
    dtype_tasks,
    says="The dtype of each tensor under autocast",
    shown=("observed",),
    across="autocast",
    keep_worker=True,
)
PARTS = Table(
    LAYERNORM,
    part_tasks,
    says="The parts of a layer norm in each dtype, beside float64",
    shown=("computed", "truth"),
)
EXPERIMENT = Experiment(
    Parameters, (SUMS, DTYPES_SEEN, PARTS), "Mixed precision", tiny=lambda given: False
)
check, start, say_where = EXPERIMENT.check, EXPERIMENT.start, EXPERIMENT.say_where
accumulate, observe = SUMS.measure_and_show, DTYPES_SEEN.measure_and_show
normalise = PARTS.measure_and_show


def draw(run: Run):
    """Every loop's running sum, as predicted, as a matplotlib figure."""
    figure, ax = view.subplots(figsize=(8, 4))
    for loop in run.parameters.loops:
        if not loop.cast:
            share = [(i + 1) / loop.terms for i in range(loop.terms)]
            ax.plot(share, [float(s) for s in loop.partial_sums()], label=name_of(loop))
    ax.set(xlabel="share of the additions", ylabel="running sum")
    ax.legend()
    return figure

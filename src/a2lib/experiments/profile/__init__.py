"""The profile experiment: what the cells of notebooks/profile.ipynb call.

``settings`` says what is traced, ``handlers`` how a worker does it.
"""

from __future__ import annotations

import dataclasses

from a2lib.experiments.harness import view
from a2lib.experiments.harness.experiment import Experiment, Table
from a2lib.experiments.harness.output import say_nothing
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.profile.settings import NSYS, TORCH, Parameters, Traced
from a2lib.experiments.steps import refuse as refuse_without_gpu
from a2lib.measure import PROFILE, StoreError, bulk, nsight

MOST = 12  # kernels that are shown


def profiler(given: Parameters, device: str) -> str:
    """Who traces: ``nsys`` or ``torch``."""
    if given.profiler != "auto":
        return given.profiler
    return NSYS if device == "cuda" and nsight.find() else TORCH


def refuse(given: Parameters, device: str) -> None:
    """Raise ParameterError for what this machine cannot do."""
    refuse_without_gpu(given, device)
    if given.profiler == NSYS and nsight.find() is None:
        raise ParameterError(
            f"profiler = 'nsys': not found on the path; ${nsight.VARIABLE} can name it"
        )


def traced(given: Parameters, device: str) -> list[Traced]:
    """What is traced, in order."""
    return given.traced(device, profiler(given, device))


def tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each configuration, all phases at once."""
    return [
        Task.whole(
            str(one), dataclasses.asdict(one), ({**one.key(), "phase": p} for p in one.phases)
        )
        for one in traced(given, device)
    ]


def _unfiled(row: view.Row) -> str:
    shares = ("no_launch_percent", "no_range_percent", "no_class_percent")
    return "/".join(f"{float(row[c]):.2g}" for c in shares)


TRACES = Table(
    PROFILE,
    tasks,
    says="Each phase by the timer, and by what the profiler saw",
    shown=("ms_timer", "ms_traced", "ms", "ms_busy", "ms_range", "us_queued", "launches"),
    derived={"unfiled, %": _unfiled},
    silence_s=1800,  # the timer's steps, then a child process and its export
)
EXPERIMENT = Experiment(
    Parameters,
    (TRACES,),
    "A step, kernel by kernel",
    tiny=lambda given: given.model == "auto",
    refuse=refuse,
)
check = EXPERIMENT.check
measure, show = TRACES.measure, TRACES.show


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on, and who traces; raises as ``EXPERIMENT.start``."""
    run = EXPERIMENT.start(given)
    who = {NSYS: "Nsight Systems", TORCH: "torch.profiler"}[profiler(given, run.device)]
    print(f"  traced by {who}{': operators, no kernels' if run.device == 'cpu' else ''}")
    return run


def kernels(run: Run) -> None:
    """Show the kernels of the first configuration asked for that take the most time."""
    one, found = _kernels(run)
    if found is None:
        say_nothing("No kernels of what is asked for are stored.")
        return
    found = found.groupby(["phase", "kind", "kernel"], as_index=False)[["calls", "ms", "share"]]
    view.show_frame(f"{one}: what takes the most time", found.sum().nlargest(MOST, "ms"))


def draw(run: Run):
    """The kernel time of that configuration's phases, made of classes, as a matplotlib figure."""
    one, found = _kernels(run)
    if found is None:
        return None
    figure, ax = view.subplots(figsize=(8, 1 + 0.5 * found["phase"].nunique()))
    sums = found.pivot_table("ms", "phase", "kind", "sum", sort=False)
    sums.plot.barh(stacked=True, ax=ax, title=str(one), xlabel="kernel time of a step, ms")
    ax.invert_yaxis()
    return figure


def _kernels(run: Run):
    """The first configuration asked for whose kernels are stored, and they as a DataFrame."""
    import pandas as pd

    stored = bulk.pictures("kernels", run.data)
    for one in traced(run.parameters, run.device):
        if (run.slug, one.picture) in stored:
            try:
                return one, pd.DataFrame(bulk.read("kernels", run.slug, one.picture, run.data).rows)
            except StoreError as error:
                print(error)
    return None, None


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    EXPERIMENT.say_where(run)
    print(
        "What the profiler wrote itself is in build/traces: nsys-ui opens a .nsys-rep, "
        "ui.perfetto.dev a .json.gz."
    )

"""The profile experiment: what the cells of notebooks/profile.ipynb call, top to bottom.

    parameters = profile.check(globals())
    run = profile.start(parameters)
    profile.measure(run)
    profile.show(run)
    profile.kernels(run)
    figure = profile.draw(run)
    profile.say_where(run)

``settings`` says what is traced, ``handlers`` how a worker does it, ``tables`` what is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping

from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task
from a2lib.experiments.harness.tables import show_tables
from a2lib.experiments.profile import view
from a2lib.experiments.profile.settings import NSYS, TORCH, Parameters, Traced
from a2lib.measure import PROFILE, nsight

NOTEBOOK = PROFILE.notebook
SECTIONS = (PROFILE,)
# The timer's steps, then a child process and its export, before the worker says anything.
SILENCE_S = 1800


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on, and who traces.

    Raises, before anything is measured, ParameterError where this machine cannot do what is asked,
    StoreError where rows could not be stored and DeviceBusy where another process measures here.
    """
    import torch

    gpu = torch.cuda.is_available()
    if not gpu and given.precision == "tf32":
        raise ParameterError("precision = 'tf32' needs a GPU; leave precision out here")
    if not gpu and given.profiler == NSYS:
        raise ParameterError("profiler = 'nsys' needs a GPU; leave profiler out here")
    if gpu and given.profiler == NSYS and nsight.find() is None:
        raise ParameterError(
            f"profiler = 'nsys': not found on the path; ${nsight.VARIABLE} can name it"
        )
    run = harness.start(given, NOTEBOOK, SECTIONS, tiny=given.model == "auto")
    print(f"  traced by {_words(run)}")
    return run


def profiler(run: Run) -> str:
    """Who traces in this run: ``nsys`` or ``torch``."""
    asked = run.parameters.profiler
    if asked != "auto":
        return asked
    return NSYS if run.device == "cuda" and nsight.find() else TORCH


def tasks(run: Run) -> list[Task]:
    """A task for each configuration, all phases at once."""
    return [_task(traced) for traced in run.parameters.traced(run.device, profiler(run))]


@measures
def measure(run: Run) -> None:
    """Time and trace what is asked for; a single configuration always, a sweep what it lacks."""
    resume = run.parameters.sweep != "shape"
    harness.measure(
        run, PROFILE, tasks(run), what="traces", resume=resume, silence_s=SILENCE_S
    )  # fmt: skip


def show(run: Run) -> None:
    """Print the stored rows of this run's configurations: a line for each phase."""
    asked = run.parameters.traced(run.device, profiler(run))
    show_tables(*view.tables(run.store(PROFILE).rows(), asked))


def kernels(run: Run) -> None:
    """Print the kernels of the first configuration asked for that take the most time."""
    show_tables(view.kernels(*_first(run, "kernels")))


def draw(run: Run):
    """The kernel time of that configuration's phases, made of classes, as a matplotlib figure."""
    return view.figure(*_first(run, "kernels"))


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "A step, kernel by kernel")
    print("What the profiler wrote itself is in build/traces: nsys-ui opens a .nsys-rep, "
          "ui.perfetto.dev a .json.gz.")  # fmt: skip


def _first(run: Run, table: str):
    """The first configuration asked for that has this bulk table, and its rows."""
    for traced in run.parameters.traced(run.device, profiler(run)):
        rows = view.rows_of(table, run.slug, traced, run.data)
        if rows:
            return traced, rows
    return None, []


def _words(run: Run) -> str:
    if profiler(run) == NSYS:
        return "Nsight Systems"
    if run.device == "cpu":
        return "torch.profiler: the operators, since a CPU has no kernels"
    why = "asked for" if run.parameters.profiler == TORCH else "Nsight Systems is not found"
    return f"torch.profiler ({why})"


def _task(traced: Traced) -> Task:
    keys = tuple({**traced.key(), "phase": phase} for phase in traced.phases)
    configuration = dataclasses.asdict(traced.configuration)
    spec = {"configuration": configuration, "profiler": traced.profiler}
    return Task(str(traced), spec, {str(traced): keys})

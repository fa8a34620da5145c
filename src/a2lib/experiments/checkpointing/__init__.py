"""The checkpointing experiment: what the cells of notebooks/checkpointing.ipynb call.

    parameters = checkpointing.check(globals())
    run = checkpointing.start(parameters)
    checkpointing.measure(run)
    checkpointing.show(run)
    figure = checkpointing.draw(run)
    checkpointing.say_where(run)

``configurations`` says what is measured, ``handlers`` how a worker does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping

from a2lib.experiments.checkpointing import view
from a2lib.experiments.checkpointing.configurations import STEPS, Parameters, Setting
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, identity
from a2lib.experiments.harness.tables import show_tables
from a2lib.measure import CHECKPOINTING

NOTEBOOK = CHECKPOINTING.notebook
SECTIONS = (CHECKPOINTING,)


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on; raises ParameterError for what this machine cannot
    do, and as ``harness.run.start`` does."""
    import torch

    given.check("cuda" if torch.cuda.is_available() else "cpu")
    return harness.start(given, NOTEBOOK, SECTIONS, tiny=given.model == "auto")


@measures
def measure(run: Run) -> None:
    """Time steps and read their memory; a single setting always, a sweep what it lacks."""
    resume = run.parameters.sweep != "shape"
    planned = tasks(run.parameters, run.device)
    harness.measure(run, CHECKPOINTING, planned, what="strategies", resume=resume)


def tasks(given: Parameters, device: str) -> list[Task]:
    """A task, and so a model that is built, for each setting; its strategies are the culprits."""
    return [_task(setting, strategies, given.steps) for setting, strategies in given.plan(device)]


def _task(setting: Setting, strategies: tuple[str, ...], steps: int = STEPS) -> Task:
    spec = {"setting": dataclasses.asdict(setting), "steps": steps}
    return Task(str(setting), spec, {name: (setting.key(name),) for name in strategies})


def rows(run: Run) -> list[dict[str, str]]:
    """The stored rows that this run's parameters ask for, in order."""
    stored = {identity(CHECKPOINTING, row): row for row in run.store(CHECKPOINTING).rows()}
    asked = [
        identity(CHECKPOINTING, key)
        for task in tasks(run.parameters, run.device)
        for keys in task.rows.values()
        for key in keys
    ]
    return [stored[key] for key in asked if key in stored]


def show(run: Run) -> None:
    """Print the stored rows of this run's parameters: a line for each strategy."""
    show_tables(*view.tables(rows(run)))


def draw(run: Run):
    """Memory against time of the same rows, as a matplotlib figure."""
    return view.figure(rows(run))


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "Checkpointing")

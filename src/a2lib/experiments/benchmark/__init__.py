"""The benchmark experiment: what the cells of notebooks/benchmark.ipynb call, top to bottom.

    parameters = benchmark.check(globals())
    run = benchmark.start(parameters)
    benchmark.measure_table(run)
    benchmark.show_table(run)
    benchmark.measure_warmup(run)
    benchmark.measure_first(run)
    benchmark.measure_power(run)
    figure = benchmark.draw(run)
    benchmark.say_where(run)

``configurations`` says what is measured, ``handlers`` how a worker does it through
``a2lib.benchmark``, ``first`` how a first step is taken apart, ``power`` what a step takes of
energy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping, Sequence

from a2lib.experiments.benchmark import view
from a2lib.experiments.benchmark.configurations import (
    REPEATS,
    SETTLED,
    STEPS,
    WARMUP,
    WARMUPS,
    Configuration,
    Parameters,
    firsts,
    powers,
    warmups,
)
from a2lib.experiments.benchmark.first import cache, parts
from a2lib.experiments.benchmark.handlers import phases
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.output import say_nothing
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, plan
from a2lib.experiments.harness.tables import show_tables
from a2lib.measure import BENCHMARK, BENCHMARK_FIRST, BENCHMARK_POWER, BENCHMARK_STEPS

NOTEBOOK = BENCHMARK.notebook
SECTIONS = (BENCHMARK, BENCHMARK_STEPS, BENCHMARK_FIRST, BENCHMARK_POWER)
NOT_ASKED = "Measured by the sweeps {0} and all (-p sweep {0})."
# All steps of one configuration, of which the worker says nothing until the last is done.
SILENCE_S = 1800


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on.

    Raises, before anything is measured, ParameterError where this machine cannot do what is asked,
    StoreError where rows could not be stored and DeviceBusy where another process measures here.
    """
    import torch

    if not torch.cuda.is_available():
        for name, refused in (("capture", True), ("precision", "tf32")):
            if getattr(given, name) == refused:
                raise ParameterError(f"{name} = {refused!r} needs a GPU; leave {name} out here")
    return harness.start(given, NOTEBOOK, SECTIONS, tiny=given.model == "auto")


@measures
def measure_table(run: Run) -> None:
    """Measure the configurations asked for, the smallest first; a single one always, a sweep what
    it lacks."""
    asked = run.parameters
    tasks = table_tasks(asked, run.device)
    if tasks:
        resume = asked.sweep != "shape"
        harness.measure(run, BENCHMARK, tasks, what="steps", resume=resume, silence_s=SILENCE_S)
    else:
        say_nothing("Measured by the sweeps table, columns and all (-p sweep all).")


@measures
def measure_warmup(run: Run) -> None:
    """Measure every step of fresh processes by ``WARMUPS``, in a sweep that has it, and print the
    mean that each gives."""
    if not run.parameters.has("warmup"):
        say_nothing(NOT_ASKED.format("warmup"))
        return
    tasks = warmup_tasks(run.device)
    harness.measure(run, BENCHMARK_STEPS, tasks, what="warm-up", silence_s=SILENCE_S)
    show_tables(view.warmups(run.store(BENCHMARK_STEPS).rows()))


@measures
def measure_first(run: Run) -> None:
    """Take the first step apart, a process for each preparation, in a sweep that has it, and print
    the parts."""
    if not run.parameters.has("first"):
        say_nothing(NOT_ASKED.format("first"))
        return
    tasks, store = first_tasks(run.device), run.store(BENCHMARK_FIRST)
    again = refilling(tasks, plan(tasks, store, remeasure=run.parameters.remeasure))
    if again:
        harness.measure(run, BENCHMARK_FIRST, again, what="caches", resume=False,
                        silence_s=SILENCE_S)  # fmt: skip
    harness.measure(run, BENCHMARK_FIRST, tasks, what="first steps", silence_s=SILENCE_S)
    show_tables(view.firsts(store.rows()))


@measures
def measure_power(run: Run) -> None:
    """Measure what some steps take of energy once the clock has settled, in a sweep that has it,
    and print it."""
    if not run.parameters.has("power"):
        say_nothing(NOT_ASKED.format("power"))
        return
    tasks = power_tasks(run.device)
    harness.measure(run, BENCHMARK_POWER, tasks, what="steps", silence_s=SILENCE_S)
    show_tables(view.powers(run.store(BENCHMARK_POWER).rows()))


def table_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each configuration, all phases at once."""
    return [
        _task(configuration, given.warmup, given.steps, phases(configuration))
        for configuration in given.configurations(device)
    ]


def warmup_tasks(device: str) -> list[Task]:
    """A task, and so a process, for each configuration and number of warm-up steps."""
    made = []
    for configuration in warmups(device):
        for warmup in WARMUPS[device]:
            key = {**configuration.key(), "warmup": warmup}
            keys = tuple(
                {**key, "step_number": step, "phase": phase}
                for step in range(warmup + STEPS)
                for phase in phases(configuration)
            )
            label = f"{configuration}, {warmup} steps of warm-up"
            made.append(Task(label, _spec(configuration, warmup, STEPS), {label: keys}))
    return made


def first_tasks(device: str) -> list[Task]:
    """A task, and so a process, for each configuration, preparation and repetition."""
    made = []
    for repeat in range(REPEATS[device]):
        for configuration, prepared in firsts(device):
            how = {"prepared": prepared, "repeat": repeat}
            keys = tuple(
                {**configuration.key(), **how, "part": part}
                for part in parts(configuration, prepared, device)
            )
            label = f"{configuration}, {prepared} prepared, {repeat}"
            spec = {"configuration": dataclasses.asdict(configuration), **how}
            made.append(Task(label, spec, {label: keys}))
    return made


def refilling(tasks: Sequence[Task], pending: Sequence[Task]) -> list[Task]:
    """Those of ``tasks`` to measure once more, for the cache that they leave: a pending one wants
    it, and rows may come from another machine, which has kept it."""

    def repeats(found: Sequence[Task], prepared: str) -> set[int]:
        return {t.spec["repeat"] for t in found if t.spec["prepared"] == prepared
                and t.spec["configuration"]["compile"] != "none"}  # fmt: skip

    wanted = {repeat for repeat in repeats(pending, "cached") if not cache(repeat).is_dir()}
    wanted -= repeats(pending, "nothing")
    return [task for task in tasks if repeats([task], "nothing") & wanted]


def power_tasks(device: str) -> list[Task]:
    """A task for each configuration whose energy is measured."""
    settled, steps = SETTLED[device]
    made = []
    for configuration in powers(device):
        spec = {**_spec(configuration, WARMUP, settled + steps), "settled": settled}
        made.append(Task(str(configuration), spec, {str(configuration): (configuration.key(),)}))
    return made


def _task(configuration: Configuration, warmup: int, steps: int, asked: tuple[str, ...]) -> Task:
    key = {**configuration.key(), "warmup": warmup}
    keys = tuple({**key, "phase": phase} for phase in asked)
    label = str(configuration)
    return Task(label, _spec(configuration, warmup, steps), {label: keys})


def _spec(configuration: Configuration, warmup: int, steps: int) -> dict[str, object]:
    return {
        "configuration": dataclasses.asdict(configuration),
        "warmup": warmup,
        "steps": steps,
    }


def rows(run: Run) -> list[dict[str, str]]:
    """The stored rows of the table that this run's parameters ask for."""
    asked = {str(c) for c in run.parameters.configurations(run.device)}
    warmup = str(run.parameters.warmup)
    return [
        row
        for row in run.store(BENCHMARK).rows()
        if str(view.configuration(row)) in asked and row["warmup"] == warmup
    ]


def show_table(run: Run) -> None:
    """Print the stored rows of this run's parameters: a line for each configuration."""
    show_tables(view.table(rows(run)))


def draw(run: Run):
    """The stored steps of the warm-up's processes as a matplotlib figure."""
    return view.figure(run.store(BENCHMARK_STEPS).rows())


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "How long is a training step?")

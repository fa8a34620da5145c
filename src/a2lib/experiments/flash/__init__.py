"""The flash experiment: what the cells of notebooks/flash.ipynb call, top to bottom.

    parameters = flash.check(globals())
    run = flash.start(parameters)
    flash.measure_ceilings(run)
    flash.compile_ahead(run)
    flash.sweep(run)
    flash.show_table(run, "ms")
    figure = flash.draw(run)
    flash.measure_protocols(run)
    flash.measure_accuracy(run)
    flash.count(run)
    flash.say_where(run)

Rows go to the result store the moment they are measured. ``comparison`` says what is timed and how,
``harness`` what is left to do and why another process does it; ``protocols``, ``accuracy`` and
``counting`` are the tables beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping, Sequence

from a2lib.experiments import ceilings
from a2lib.experiments.flash import accuracy, counting, precompile, protocols, tables, view
from a2lib.experiments.flash.shapes import Parameters, Shape
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.output import say_nothing
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, plan
from a2lib.experiments.harness.tables import show_tables
from a2lib.measure import (
    CEILING,
    FLASH,
    FLASH_ACCURACY,
    FLASH_COUNTERS,
    FLASH_PROTOCOL,
    Section,
)

NOTEBOOK = FLASH.notebook
CEILING_SILENCE_S = 300


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on.

    Raises, before anything is measured, StoreError where rows could not be stored and DeviceBusy
    where another process measures on the device.
    """
    tiny = given.sweep != "shape" or given.seq_len is None
    return harness.start(given, NOTEBOOK, (FLASH, CEILING), tiny=tiny)


@measures
def measure_ceilings(run: Run) -> None:
    """Measure and print what the device does at best: matrix products and a copy."""
    harness.measure(
        run,
        CEILING,
        ceilings.tasks(run.device),
        say=ceilings.line,
        resume=False,
        silence_s=CEILING_SILENCE_S,
        keep_worker=True,
    )


def tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each shape: the passes asked for of each implementation, in turns."""
    return [
        Task(
            str(shape),
            {"shape": dataclasses.asdict(shape)},
            {
                name: tuple(shape.key(name, pass_) for pass_ in given.chosen_passes(name))
                for name in given.chosen_implementations(shape, device)
            },
            in_turns=True,
        )
        for shape in given.shapes(device)
    ]


@measures
def compile_ahead(run: Run) -> None:
    """Fill the compilation caches for what is pending, in parallel, where that pays."""
    asked = tasks(run.parameters, run.device)
    pending = {
        Shape(**task.spec["shape"]): tuple(task.rows)
        for task in plan(
            asked, run.store(FLASH), resume=_resumes(run), remeasure=run.parameters.remeasure
        )
    }
    harness.compile_ahead(run, precompile.compilations(pending), precompile.HANDLER)


@measures
def sweep(run: Run) -> None:
    """Measure what is pending, with a progress bar; rows are stored one by one."""
    harness.measure(run, FLASH, tasks(run.parameters, run.device), resume=_resumes(run))


def show_table(run: Run, quantity: str) -> None:
    """Print the stored rows of this run's parameters: "ms", "TFLOP/s" or "MiB" (peak memory)."""
    best = run.store(CEILING).rows()
    made = view.tables(rows(run), quantity, best, run.parameters.sweep == "shape")
    show_tables(*made)
    if not made:
        alone = ", is measured on a GPU alone" if rows(run) else ""
        say_nothing(f"Nothing here: {view.QUANTITIES[quantity]}{alone}.")


def draw(run: Run):
    """The stored rows of this run's parameters as a matplotlib figure."""
    device = "CPU" if run.device == "cpu" else run.slug
    best = run.store(CEILING).rows()
    return view.figure(rows(run), best, run.parameters.sweep == "shape", device)


@measures
def measure_protocols(run: Run) -> None:
    """Measure the leaderboard's shape by three protocols and print them, in a sweep that has it."""
    asked = protocols.tasks(run.parameters, run.device)
    _measure_table(run, asked, "protocols", FLASH_PROTOCOL, tables.protocols)


@measures
def measure_accuracy(run: Run) -> None:
    """Measure the errors against float64 and print them, in a sweep that has them."""
    asked = accuracy.tasks(run.parameters, run.device)
    _measure_table(run, asked, "accuracy", FLASH_ACCURACY, tables.accuracy)


@measures
def count(run: Run) -> None:
    """Count what the hardware does at the headline shapes and print it, in a sweep that has it."""
    asked = counting.tasks(run.parameters, run.device)
    _measure_table(run, asked, "counting", FLASH_COUNTERS, tables.counters)


def _measure_table(
    run: Run, asked: Sequence[Task], what: str, section: Section, made: Callable
) -> None:
    if not asked:
        say_nothing("Measured by the sweeps leaderboard and all (-p sweep leaderboard).")
        return
    store = run.store(section)
    store.check_writable()
    harness.measure(run, section, asked, what=what)
    show_tables(made(store.rows()))
    print(f"Rows: {harness.shown(store.path)}")


def rows(run: Run) -> list[dict[str, str]]:
    """The stored rows that this run's parameters ask for, measured now or earlier."""
    asked = run.parameters
    names = {s: asked.chosen_implementations(s, run.device) for s in asked.shapes(run.device)}
    return [
        row
        for row in run.store(FLASH).rows()
        if row["implementation"] in names.get(view.shape_of(row), ())
        and row["pass"] in asked.chosen_passes()
    ]


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, (FLASH, CEILING), "FlashAttention-2")


def _resumes(run: Run) -> bool:
    """A single shape is always measured; a sweep goes on."""
    return run.parameters.sweep != "shape"

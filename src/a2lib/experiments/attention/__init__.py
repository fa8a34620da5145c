"""The attention experiment: what the cells of notebooks/attention.ipynb call, top to bottom.

    parameters = attention.check(globals())
    run = attention.start(parameters)
    attention.measure_passes(run)
    attention.show_passes(run)
    attention.measure_saved(run)
    attention.measure_limit(run)
    figure = attention.draw(run)
    attention.say_where(run)

``configurations`` says what is measured, ``handlers`` and ``limits`` how a worker does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping

from a2lib.experiments.attention import view
from a2lib.experiments.attention.configurations import (
    ALLOCATORS,
    BATCH,
    DTYPE,
    PASSES,
    Parameters,
    head_dims,
    saved_tensors,
)
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.output import say_nothing
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, identity
from a2lib.experiments.harness.tables import show_tables
from a2lib.measure import ATTENTION, ATTENTION_LIMIT, ATTENTION_SAVED

NOTEBOOK = ATTENTION.notebook
SECTIONS = (ATTENTION, ATTENTION_SAVED, ATTENTION_LIMIT)


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on; raises as ``harness.run.start`` does."""
    return harness.start(given, NOTEBOOK, SECTIONS, tiny=given.seq_len is None)


@measures
def measure_passes(run: Run) -> None:
    """Time forward and backward, and read their memory; a single shape always, a sweep what it
    lacks."""
    tasks = pass_tasks(run.parameters, run.device)
    if tasks:
        resume = run.parameters.sweep != "shape"
        harness.measure(run, ATTENTION, tasks, what="passes", resume=resume, keep_worker=True)
    else:
        say_nothing("Measured by the sweeps grid, beyond, removed and all (-p sweep all).")


@measures
def measure_saved(run: Run) -> None:
    """Ask autograd what it saves at the same shapes, and print it for the largest."""
    asked = run.parameters
    tasks = saved_tasks(asked, run.device)
    if tasks:
        resume = asked.sweep != "shape"
        harness.measure(run, ATTENTION_SAVED, tasks, what="saved tensors", resume=resume,
                        keep_worker=asked.has("limit"))  # fmt: skip
        show_tables(view.saved(_stored(run, ATTENTION_SAVED, tasks)))


@measures
def measure_limit(run: Run) -> None:
    """Find the longest sequence that fits, in a sweep that has it, and print it beside what was
    predicted."""
    if not run.parameters.has("limit"):
        say_nothing("Measured by the sweeps limit and all (-p sweep limit).")
        return
    tasks = limit_tasks(run.device)
    harness.measure(run, ATTENTION_LIMIT, tasks, what="limits")
    show_tables(view.limits(_stored(run, ATTENTION_LIMIT, tasks)))


def pass_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each implementation and shape, both passes."""
    made = []
    for name, shape, calls in given.configurations(device):
        keys = tuple({**shape.key(name), "pass": pass_} for pass_ in PASSES)
        made.append(_task(f"{name} {shape}", name, shape, keys, calls=calls))
    return made


def saved_tasks(given: Parameters, device: str) -> list[Task]:
    """A task for each implementation and shape, every tensor that it should save."""
    made = []
    for name, shape, _ in given.configurations(device):
        keys = tuple({**shape.key(name), "tensor": t} for t in saved_tensors(name, shape))
        made.append(_task(f"saved by {name} {shape}", name, shape, keys))
    return made


def limit_tasks(device: str) -> list[Task]:
    """A task for each size, mask, pass and way to allocate."""
    made = []
    for allocator in ALLOCATORS:
        for causal in (False, True):
            for head_dim in head_dims(device):
                for pass_ in PASSES:
                    key = {"implementation": "eager", "dtype": DTYPE, "batch": BATCH,
                           "head_dim": head_dim, "causal": causal, "pass": pass_,
                           "allocator": allocator}  # fmt: skip
                    label = f"limit of d = {head_dim}, {pass_}, {allocator}"
                    label += ", causal" if causal else ""
                    made.append(Task(label, {}, {label: (key,)}))
    return made


def _task(label: str, name: str, shape, keys: tuple, **more: object) -> Task:
    spec = {"implementation": name, "shape": dataclasses.asdict(shape), **more}
    return Task(label, spec, {label: keys})


def _stored(run: Run, section, tasks: list[Task]) -> list[dict[str, str]]:
    """The stored rows of ``section`` that ``tasks`` ask for."""
    wanted = {identity(section, key) for t in tasks for keys in t.rows.values() for key in keys}
    return [row for row in run.store(section).rows() if identity(section, row) in wanted]


def show_passes(run: Run) -> None:
    """Print the stored rows of this run's parameters: a line for each pass."""
    show_tables(view.passes(_stored(run, ATTENTION, pass_tasks(run.parameters, run.device))))


def draw(run: Run):
    """Time against length of the stored rows of this device, as a matplotlib figure."""
    return view.figure(run.store(ATTENTION).rows())


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "Attention in plain PyTorch")

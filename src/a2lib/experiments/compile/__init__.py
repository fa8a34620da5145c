"""The compile experiment: what the cells of notebooks/compile.ipynb call, top to bottom.

    parameters = compiling.check(globals())
    run = compiling.start(parameters)
    compiling.measure_attention(run)
    compiling.measure_models(run)
    figure = compiling.draw(run)
    compiling.say_where(run)

``settings`` says what is measured, ``attention`` and ``model`` how a worker does it, ``inductor``
how the compiler is watched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence

from a2lib.experiments.benchmark.handlers import phases
from a2lib.experiments.compile.settings import Parameters, Shape, Steps
from a2lib.experiments.harness import parameters
from a2lib.experiments.harness import run as harness
from a2lib.experiments.harness.guard import measures
from a2lib.experiments.harness.output import say_nothing
from a2lib.experiments.harness.parameters import ParameterError
from a2lib.experiments.harness.picture import legend_beside, subplots
from a2lib.experiments.harness.run import Run
from a2lib.experiments.harness.sweep import Task, identity
from a2lib.experiments.harness.tables import Table, number, show_tables, table
from a2lib.measure import COMPILE_ATTENTION, COMPILE_MODEL

NOTEBOOK = COMPILE_ATTENTION.notebook
SECTIONS = (COMPILE_ATTENTION, COMPILE_MODEL)
# Of a large model compiled as one graph, minutes pass before the worker says anything.
SILENCE_S = 3600
Row = Mapping[str, str]


def check(namespace: MutableMapping) -> Parameters:
    """The notebook's parameters out of its globals; raises ParameterError for a wrong one."""
    return parameters.check(namespace, Parameters)


def start(given: Parameters) -> Run:
    """Record the run and print what it runs on.

    Raises, before anything is measured, ParameterError where this machine cannot do what is asked,
    StoreError where rows could not be stored and DeviceBusy where another process measures here.
    """
    import torch

    if given.precision == "tf32" and not torch.cuda.is_available():
        raise ParameterError("precision = 'tf32' needs a GPU; leave precision out here")
    return harness.start(given, NOTEBOOK, SECTIONS, tiny=given.seq_len is None)


def attention_tasks(shapes: Sequence[Shape]) -> list[Task]:
    """A task for each shape, eager and compiled in turns."""
    return [
        Task(str(shape), {"shape": dataclasses.asdict(shape)}, shape.keys(), in_turns=True)
        for shape in shapes
    ]


def model_tasks(steps: Sequence[Steps]) -> list[Task]:
    """A task for each model, its ways of compiling in turns."""
    return [
        Task(
            str(one), {"steps": dataclasses.asdict(one)},
            {way: tuple(_keys(one, way)) for way in one.ways}, in_turns=True,
        )
        for one in steps
    ]  # fmt: skip


@measures
def measure_attention(run: Run) -> None:
    """Measure attention, eager and compiled; a single shape always, a sweep what it lacks."""
    tasks = attention_tasks(run.parameters.shapes(run.device))
    resume = run.parameters.sweep != "shape"
    harness.measure(run, COMPILE_ATTENTION, tasks, what="attention", resume=resume)
    show_tables(_attention_table(_rows(run, COMPILE_ATTENTION, tasks)))


@measures
def measure_models(run: Run) -> None:
    """Measure steps, eager and compiled; a single model always, a sweep what it lacks."""
    tasks = model_tasks(run.parameters.steps(run.device))
    if not tasks:
        say_nothing("No model is asked for here (-p model small, or -p sweep models).")
        return
    resume = run.parameters.sweep != "shape"
    harness.measure(
        run, COMPILE_MODEL, tasks, what="models", resume=resume, silence_s=SILENCE_S
    )  # fmt: skip
    show_tables(_model_table(_rows(run, COMPILE_MODEL, tasks)))


def draw(run: Run):
    """Eager over compiled time of the stored attention rows against the length, a line for each
    head size and pass: a matplotlib figure, or None without rows."""
    found: dict[tuple, dict[int, dict[str, float]]] = {}
    for row in run.store(COMPILE_ATTENTION).rows():
        if row["ms"]:
            line = (row["written"], row["dtype"], int(row["head_dim"]), row["pass"])
            at = found.setdefault(line, {}).setdefault(int(row["seq_len"]), {})
            at[row["implementation"]] = float(row["ms"])
    if not found:
        return None
    figure, ax = subplots(figsize=(8, 4))
    for line, lengths in sorted(found.items()):
        both = [
            (n, at["eager"] / at["compile"]) for n, at in sorted(lengths.items()) if len(at) > 1
        ]
        if both:
            ax.plot(*zip(*both, strict=True), marker=".", label=" ".join(map(str, line)))
    ax.axhline(1, color="gray", linewidth=1)
    ax.set(xscale="log", xlabel="tokens", ylabel="eager time over compiled time")
    legend_beside(figure, ax)
    return figure


def say_where(run: Run) -> None:
    """Print where the rows are and how they get into the book."""
    harness.say_where(run, SECTIONS, "torch.compile")


def _keys(one: Steps, way: str) -> list[dict[str, object]]:
    configuration = one.configuration(way)
    key = {c: v for c, v in configuration.key().items() if c in COMPILE_MODEL.key}
    return [{**key, "phase": phase} for phase in phases(configuration)]


def _rows(run: Run, section, tasks: Sequence[Task]) -> list[Row]:
    asked = {
        identity(section, key) for task in tasks for keys in task.rows.values() for key in keys
    }
    return [row for row in run.store(section).rows() if identity(section, row) in asked]


def _attention_table(rows: Sequence[Row]) -> Table:
    body = []
    for row in rows:
        shape = f"{row['written']} {row['dtype']} {row['seq_len']}x{row['head_dim']}"
        body.append([shape, row["pass"], row["implementation"], *_cells(row)])
    return table(body, ["shape", "pass", "", *_HEADS], f"Attention, eager and compiled: {_SAYS}.")


def _model_table(rows: Sequence[Row]) -> Table:
    body = []
    for row in rows:
        what = f"{row['model']} {row['context']} {row['precision']} {row['mode']}"
        body.append([what, row["phase"], row["compile"], *_cells(row)])
    return table(body, ["model", "phase", "compiled", *_HEADS], f"The step of a model: {_SAYS}.")


_SAYS = "the median call, the first one with nothing compiled yet, and what Inductor made"
_HEADS = ("ms", "first, s", "from the cache, s", "kernels written", "called", "library calls", "")


def _cells(row: Row) -> list[str]:
    ms = number(float(row["ms"])) if row["ms"] else row["status"]
    firsts = [f"{float(row[c]) / 1e3:.3g}" if row[c] else "-" for c in ("ms_cold", "ms_warm")]
    made = [row[c] or "-" for c in ("kernels_written", "kernels_called", "library_calls")]
    return [ms, *firsts, *made, row["note"]]
